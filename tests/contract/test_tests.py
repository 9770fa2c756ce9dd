"""The tests themselves: what several need is in a module of helpers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
EXEMPT = ("test_options_page",)
"""Beginnings of names. It looks the tests up that the page names."""


def imported(path: Path) -> Iterator[str]:
    """The dotted names that a module imports from `tests`, with the names that it takes from them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tests":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield from (f"{node.module or ''}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def from_tests(path: Path) -> list[str]:
    return [
        name
        for name in imported(path)
        if any(part.startswith("test_") or part == "conftest" for part in name.split("."))
    ]


def test_nothing_is_imported_from_a_test() -> None:
    found = {path.name: from_tests(path) for path in TESTS.rglob("*.py") if not path.name.startswith(EXEMPT)}
    assert {name: taken for name, taken in found.items() if taken} == {}


def test_imports_from_tests_are_seen(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    for line in (
        "from tests.unit.test_a import helper",
        "from tests.unit import test_a",
        "from .test_a import helper",
        "import tests.unit.test_a",
        "from tests.conftest import helper",
    ):
        module.write_text(line + "\n")
        assert from_tests(module), line
    module.write_text("from tests.agents import build_agent\n")
    assert not from_tests(module)
