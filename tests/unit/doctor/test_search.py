"""The search engine, and servers that are not as they should be."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sorl_trl.doctor import examine
from sorl_trl.doctor.checks import search as search_checks
from sorl_trl.search import BM25Index, NoSearch, RecordingSearch
from tests.unit.doctor.recipes import complaints, line_of, the_complaint, write_recipe, write_rows
from tests.unit.search.servers import Reply, Server, result


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def recipe(tmp_path: Path, server: Server) -> Path:
    server.reply = lambda request: result(
        [[{"document": {"id": "1", "contents": '"Rome"\nrome'}, "score": 1.0}] for _ in request["queries"]]
    )
    return write_recipe(tmp_path, corpus=None, search_url=server.url)


def test_a_server_that_answers(recipe: Path, server: Server) -> None:
    assert not complaints(recipe)
    assert [len(request["queries"]) for request in server.requests] == [1] * 5 + [8], "what one process asks at a time"
    assert {request["topk"] for request in server.requests} == {1}


def test_an_unreachable_server(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/retrieve"
    recipe = write_recipe(tmp_path, corpus=None, search_url=url)
    found = the_complaint(recipe)
    assert (found.check, found.level) == ("search", "error")
    assert found.what.startswith("the engine does not answer: ")
    assert "refused" in found.what
    assert found.change == f"search_url  {line_of(recipe, 'search_url')}"


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply(b"broken", status=500), "the engine does not answer: "),
        (Reply(b"no such thing", status=422), "the engine refuses the questions: "),
        (Reply(b"not found", status=404), "404"),
        (Reply(b'{"answer": 1}'), ""),
        (result([[], []]), ""),
    ],
    ids=["500", "422", "404", "another format", "wrong length"],
)
def test_a_server_that_misbehaves(recipe: Path, server: Server, reply: Reply, said: str) -> None:
    server.reply = lambda request: reply
    found = the_complaint(recipe)
    assert (found.check, found.level) == ("search", "error")
    assert said in found.what
    assert found.change == f"search_url  {line_of(recipe, 'search_url')}"
    assert len(server.requests) == 1, "asked again"


def test_a_slow_server(recipe: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_checks, "SLOW_S", 0.1)
    quick = server.reply

    def slow(request: dict[str, list[str]]) -> Reply:
        time.sleep(0.3 if len(request["queries"]) > 1 else 0.0)
        return quick(request)

    server.reply = slow
    found = the_complaint(recipe)
    assert (found.check, found.level) == ("search", "warning")
    assert "8 at once 0." in found.what
    assert found.what.endswith(": every turn of a rollout waits for that")


def test_a_server_that_never_answers(recipe: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_checks, "TIMEOUT_S", 0.2)
    quick = server.reply

    def stuck(request: dict[str, list[str]]) -> Reply:
        time.sleep(1.0)
        return quick(request)

    server.reply = stuck
    assert the_complaint(recipe).what.startswith("the engine does not answer: ")


def test_nothing_is_found(recipe: Path, server: Server) -> None:
    server.reply = lambda request: result([[] for _ in request["queries"]])
    found = the_complaint(recipe)
    assert (found.check, found.level) == ("search", "warning")
    assert found.what == "5 questions found nothing at all: is it the right corpus?"


def test_a_corpus_that_changed_under_its_index(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    BM25Index.build(tmp_path / "corpus.jsonl", tmp_path / "corpus.jsonl.index", show_progress=False)
    assert not complaints(recipe)
    write_rows(tmp_path / "corpus.jsonl", [{"id": "0", "title": "", "content": "another"}])
    found = the_complaint(recipe)
    assert (found.check, found.level) == ("search", "error")
    assert "was built from another content" in found.what
    assert found.change == f"corpus  {line_of(recipe, 'corpus')}"


def test_a_large_corpus_without_index_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_checks, "BUILT_AT_ONCE", 10)
    found = examine(str(write_recipe(tmp_path)))
    (search,) = [finding for finding in found if finding.check == "search"]
    assert search.level == "skipped"
    assert f"--corpus {tmp_path}/corpus.jsonl --output {tmp_path}/corpus.jsonl.index" in search.what


@pytest.mark.parametrize("with_server", [True, False])
def test_nothing_is_written_for_a_run(recipe: Path, tmp_path: Path, with_server: bool) -> None:
    if not with_server:
        recipe = write_recipe(tmp_path)
        BM25Index.build(tmp_path / "corpus.jsonl", tmp_path / "corpus.jsonl.index", show_progress=False)
    before = {*tmp_path.rglob("*")}
    assert not complaints(recipe, "--record", str(tmp_path / "record"), "--search_cache", str(tmp_path / "cache"))
    assert {*tmp_path.rglob("*")} == before


def test_a_recording_is_opened(tmp_path: Path) -> None:
    RecordingSearch(NoSearch(), tmp_path / "searches.jsonl").search_batch(["where rome"], 1)
    recipe = write_recipe(tmp_path, corpus=None, replay=str(tmp_path / "searches.jsonl"))
    assert not complaints(recipe)
    (tmp_path / "searches.jsonl").write_text("no recording\n")
    assert the_complaint(recipe).change == f"replay  {line_of(recipe, 'replay')}"


def test_a_recording_of_other_searches(tmp_path: Path) -> None:
    recording = RecordingSearch(NoSearch(), tmp_path / "searches.jsonl")
    for query, k in (("rome", 2), ("oslo", 5), ("bonn", 5)):
        recording.search_batch([query], k)
    with (tmp_path / "searches.jsonl").open("a") as file:
        file.write('{"query": "unfinished", "k": 1')
    recipe = write_recipe(tmp_path, corpus=None, replay=str(tmp_path / "searches.jsonl"))
    found = the_complaint(recipe)
    assert (found.check, found.level) == ("search", "error")
    assert found.what == f"`search_top_k` is 1, but {tmp_path}/searches.jsonl has only searches for 2 or 5 passages"
    assert found.change == f"search_top_k: 5  {line_of(recipe, 'search_top_k')}"
    RecordingSearch(NoSearch(), tmp_path / "searches.jsonl").search_batch(["rome"], 1)
    assert not complaints(recipe)


def test_a_server_instead_of_a_corpus_with_an_engine(recipe: Path, tmp_path: Path, server: Server) -> None:
    recipe = write_recipe(tmp_path, search_engine="tantivy")
    assert not complaints(recipe, "--search_url", server.url)


def test_no_search(tmp_path: Path) -> None:
    assert not complaints(write_recipe(tmp_path), "--no_search", "true")
