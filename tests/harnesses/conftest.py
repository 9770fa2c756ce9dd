"""Harnesses in processes of their own: `make test-agents`. Without them nothing here is collected."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

COMMANDS = Path(__file__).parents[2] / ".harnesses" / "node_modules" / ".bin"

if find_spec("minisweagent") is None or not COMMANDS.is_dir():
    collect_ignore_glob = ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.agents)
