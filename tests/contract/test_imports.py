"""What an import loads, and does without. Which package may import which is in pyproject.toml, for `make lint`."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import sorl_trl

SOURCE = Path(sorl_trl.__file__).parent
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OPTIONAL = {"deepspeed", "fastapi", "pydantic", "starlette", "uvicorn", "vllm"}
"""Whoever has not installed them must still be able to import every module."""


def dotted(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def loaded_by(statement: str) -> set[str]:
    """What a fresh process ends up with, the imports of other libraries included."""
    code = f"import sys; {statement}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.trains
def test_every_module_imports_without_the_optional_libraries() -> None:
    """To Python, a module that is None has not been installed."""
    names = [dotted(path, SOURCE.parent) for path in sorted(SOURCE.rglob("*.py"))]
    without = f"sys.modules.update(dict.fromkeys({sorted(OPTIONAL)}))"
    imported = loaded_by(f"import importlib; {without}; [importlib.import_module(name) for name in {names}]")
    assert imported >= set(names)


@pytest.mark.trains
def test_trls_calls_of_renamed_methods_are_not_reported_in_each_rollout() -> None:
    code = (
        "import sorl_trl.trainers\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        "sizes = dict.fromkeys(('hidden_size', 'intermediate_size', 'num_attention_heads', 'num_hidden_layers'), 2)\n"
        "LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes)).gradient_checkpointing_disable()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "FutureWarning" not in done.stderr


@pytest.mark.parametrize("path", sorted(BENCHMARKS.rglob("*.py")), ids=lambda path: path.stem)
def test_each_benchmark_can_be_imported(path: Path) -> None:
    try:
        import_module(dotted(path, BENCHMARKS.parent))
    except ModuleNotFoundError as error:
        if error.name not in ("textarena", "textworld"):
            raise
        pytest.skip("needs an environment of its own (make test-worlds)")
