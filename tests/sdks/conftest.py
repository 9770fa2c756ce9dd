"""Agents of several SDKs: `make test-agents`. Without the SDKs nothing here is collected."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.sdks.agents import Search

if find_spec("smolagents") is None:
    collect_ignore_glob = ["test_*.py"]

# Otherwise the OpenAI Agents SDKs, LangChain and Agno send traces, and LiteLLM fetches prices.
os.environ.update(OPENAI_AGENTS_DISABLE_TRACING="1", LANGSMITH_TRACING="false", AGNO_TELEMETRY="false")
os.environ.update(LITELLM_LOCAL_MODEL_COST_MAP="True")
NOISE = ("Pydantic serializer warnings", "Function 'search' has decorators", "The `__fields", "Accessing the 'model_")
"""Warnings that LiteLLM, smolagents and LlamaIndex cause in libraries of their own."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.agents)
            for warning in NOISE:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{warning}"))


@pytest.fixture(autouse=True)
def no_other_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No SDK may ask for an address but the endpoint's."""
    look_up, asked = socket.getaddrinfo, []

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        if host not in ("127.0.0.1", "localhost"):
            asked.append(host)
            raise socket.gaierror(f"{host} is not asked in tests")
        return look_up(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield
    assert not asked


@pytest.fixture(scope="session")
def search(tmp_path_factory: pytest.TempPathFactory) -> Search:
    """A search engine over four passages, as a function that gives the first."""
    from sorl_trl.search import BM25Index, write_corpus
    from sorl_trl.types import Passage

    folder = tmp_path_factory.mktemp("atlas")
    cities = {"Oslo": "Norway", "Bergen": "Norway", "Bern": "Switzerland", "Tromsø": "the north of Norway"}
    passages = [Passage(name, name, f"{name} is in {where}.", 0.0) for name, where in cities.items()]
    write_corpus(passages, folder / "corpus.jsonl")
    index = BM25Index.build(folder / "corpus.jsonl", folder / "index", show_progress=False)
    return lambda query: index.search_batch([query], 1)[0][0].text
