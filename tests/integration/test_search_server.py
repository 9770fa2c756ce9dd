"""The search server as users start it: a process of its own, asked over a socket."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from sorl_trl.rollout import SearchResponder
from sorl_trl.search import BM25Index, HTTPSearch, RetryPolicy, write_corpus
from sorl_trl.types import Passage

PASSAGES = [
    Passage("fr", "France", "The capital of France is Paris."),
    Passage("it", "Italy", "The capital of Italy is Rome."),
    Passage("no", "Norway", 'The capital of Norway is "Oslo".\nIt has a 日本 garden.'),
    Passage("pe", "", "Lima is a capital without a title"),
]
SERVE = [sys.executable, "-c", "import sys; from sorl_trl.cli.main import main; sys.exit(main())", "serve"]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BM25Index]:
    folder = tmp_path_factory.mktemp("search")
    write_corpus(PASSAGES, folder / "corpus.jsonl")
    return folder / "index", BM25Index.build(folder / "corpus.jsonl", folder / "index", show_progress=False)


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [*SERVE, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def address(process: subprocess.Popen[str]) -> str:
    """The server's output once it listens."""
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.fullmatch(r"4 passages \(bm25-[0-9a-f]{16}\) on (http://127\.0\.0\.1:\d+)/retrieve\n", line)
    assert found, f"{line!r}: {process.stderr.read() if process.stderr else ''}"
    return found[1]


@pytest.fixture(scope="module")
def url(index: tuple[Path, BM25Index]) -> Iterator[str]:
    process = start("--index", index[0], "--port", 0)
    try:
        yield address(process)
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=60)
        assert (process.returncode, errors) == (0, "")


def document(passage: Passage) -> dict[str, str]:
    contents = f'"{passage.title}"\n{passage.text}' if passage.title else passage.text
    return {"id": passage.id, "title": passage.title, "text": passage.text, "contents": contents}


def ask(url: str, **fields: Any) -> httpx2.Response:
    return httpx2.post(f"{url}/retrieve", json=fields, timeout=60)


def test_it_answers_as_search_r1_does_with_scores_or_without(index, url):
    [found] = index[1].search_batch(["capital"], 3)
    for defaults in ({}, {"topk": None, "return_scores": None}):
        assert ask(url, queries=["capital"], **defaults).json() == {"result": [[document(hit) for hit in found]]}
    expected = [[{"document": document(hit), "score": hit.score} for hit in found[:2]], []]
    assert ask(url, queries=["capital", ""], topk=2, return_scores=True).json() == {"result": expected}


@pytest.mark.parametrize(("fields", "place"), [({"topk": 0}, "topk"), ({"queries": "a"}, "queries")])
def test_a_request_that_is_refused_names_the_field(url, fields, place):
    answer = ask(url, **{"queries": ["a"], **fields})
    assert answer.status_code == 422
    assert answer.json()["detail"][0]["loc"] == ["body", place]


def test_whatever_a_policy_asks_is_answered(index, url):
    queries = ["", " ", "日本", "\ud800 Rome", "\x00", "field:(Paris", "Norway " * 150_000, "capital"]
    found = SearchResponder(HTTPSearch(f"{url}/retrieve"), retry=RetryPolicy(attempts=1)).search(queries)
    expected = [tuple(hits) for hits in index[1].search_batch(queries, 3)]
    assert [found[query].passages for query in queries] == expected
    assert [len(hits) for hits in expected] == [0, 0, 1, 1, 0, 1, 1, 3]
