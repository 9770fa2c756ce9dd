"""A real vLLM on the CPU: `make test-vllm`. Without vLLM nothing here is collected."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.vllm import shims

    os.environ.update(shims.ENVIRONMENT)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(autouse=True)
def _shims() -> None:
    shims.install()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a vLLM server, which starts with a random policy: that of a test comes from its trainer."""
    from tests.vllm.policies import WINDOW, save_policy
    from tests.vllm.servers import serving

    folder = tmp_path_factory.mktemp("server")
    with serving(save_policy(folder / "policy", seed=1), WINDOW, folder / "output.txt") as served:
        yield served.url


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Every engine that a test has started, which is shut down after it: its memory would stay taken."""
    started: list[Any] = []
    monkeypatch.setattr(shims, "STARTED", started)
    yield started
    for llm in started:
        llm.llm_engine.engine_core.shutdown()
    started.clear()
    gc.collect()
