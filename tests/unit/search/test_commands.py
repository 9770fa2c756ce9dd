"""The web application by itself, asked over ASGI without a socket, and the command `sorl index`."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from sorl_trl.cli.main import main
from sorl_trl.search import open_index
from sorl_trl.search.commands import create_app


@dataclass(frozen=True)
class Answer:
    status: int
    body: dict


async def ask(app, body: bytes, path: str = "/retrieve") -> Answer:
    headers = [(b"content-type", b"application/json"), (b"host", b"test")]
    scope = {"type": "http", "method": "POST" if body else "GET", "path": path, "raw_path": path.encode()}
    scope |= {"query_string": b"", "headers": headers, "http_version": "1.1", "scheme": "http"}
    pending = [{"type": "http.request", "body": body}]
    sent = []

    async def receive():
        return pending.pop(0) if pending else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    return Answer(sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent)))


def retrieve(app, **fields) -> Answer:
    return asyncio.run(ask(app, json.dumps(fields).encode()))


@pytest.fixture(scope="module")
def app(index):
    return create_app(index)


def document(passage):
    contents = f'"{passage.title}"\n{passage.text}' if passage.title else passage.text
    return {"id": passage.id, "title": passage.title, "text": passage.text, "contents": contents}


@pytest.mark.parametrize("fields", [{}, {"topk": None, "return_scores": None}, {"topk": 3, "return_scores": False}])
def test_bare_documents_and_three_of_them_by_default(app, index, fields):
    expected = [document(hit) for hit in index.search_batch(["capital twin stars"], 3)[0]]
    assert len(expected) == 3
    assert retrieve(app, queries=["capital twin stars"], **fields) == Answer(200, {"result": [expected]})


def test_with_scores_it_answers_as_the_index_does(app, index):
    queries = ["capital Italy", "日本", "", "zzz", "\ud800 Rome", "\x00", '" OR 1', "x" * 10_000]
    found = index.search_batch(queries, 2)
    expected = [[{"document": document(hit), "score": hit.score} for hit in hits] for hits in found]
    assert retrieve(app, queries=queries, topk=2, return_scores=True) == Answer(200, {"result": expected})


def test_health(app, index):
    expected = {"status": "ok", "engine": "bm25", "documents": len(index), "identity": index.identity}
    assert asyncio.run(ask(app, b"", "/health")) == Answer(200, expected)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"queries": ["a"] * 4097}, ["queries"]),
        ({"queries": ["a", "b" * 10_001]}, ["queries", 1]),
        ({"queries": ["a"], "topk": 0}, ["topk"]),
        ({"queries": ["a"], "topk": 101}, ["topk"]),
        ({"queries": "a"}, ["queries"]),
    ],
)
def test_a_request_outside_the_limits_names_the_field(app, fields, place):
    answer = retrieve(app, **fields)
    assert answer.status == 422
    assert answer.body["detail"][0]["loc"] == ["body", *place]


def test_a_slow_search_does_not_hold_up_another():
    """Each of two searches waits for the other to begin."""
    both = threading.Barrier(2, timeout=20)

    class Slow:
        def search_batch(self, queries, k):
            both.wait()
            return [[] for _ in queries]

    app = create_app(Slow())

    async def ask_twice():
        return await asyncio.gather(*(ask(app, b'{"queries": ["a"]}') for _ in range(2)))

    assert [answer.status for answer in asyncio.run(ask_twice())] == [200, 200]


def index_command(*arguments: object) -> int:
    return main(["index", *map(str, arguments)])


def test_the_command_line_says_what_it_made(corpus_path, tmp_path, capsys):
    output = tmp_path / "deep/index"
    assert index_command("--corpus", corpus_path, corpus_path, "--output", output, "--engine", "tantivy") == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("14 passages, ")
    assert open_index(output).identity in shown.out
    assert "Reading passages" in shown.err


def test_the_command_line_hands_the_options_of_the_model_on(corpus_path, embedder, tmp_path):
    options = ("--model", embedder, "--query_prefix", "q ", "--passage_prefix", "")
    arguments = ("--corpus", corpus_path, "--output", tmp_path / "index", "--engine", "dense")
    assert index_command(*arguments, *options) == 0
    settings = json.loads((tmp_path / "index/manifest.json").read_text())["settings"]
    assert settings == {"model": str(embedder), "query_prefix": "q ", "passage_prefix": ""}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--corpus", "nowhere.jsonl"], "`corpus` is 'nowhere.jsonl'"),
        (["--corpus", "broken.jsonl"], "broken.jsonl, line 2"),
        (["--corpus", "silent.jsonl"], "corpus"),
        (["--corpus", "silent.jsonl", "--output", "folder"], "index_dir"),
        (["--corpus", "silent.jsonl", "--query_prefix", "q "], "--query_prefix"),
        (["--corpus", "silent.jsonl", "--engine", "dense", "--model", "nowhere"], "got 'nowhere'"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(tmp_path, monkeypatch, capfd, arguments, named):
    monkeypatch.chdir(tmp_path)
    Path("broken.jsonl").write_text('{"id": 1, "contents": "T\\nt"}\n{\n')
    Path("silent.jsonl").write_text('{"id": 1, "contents": "?\\n!"}\n')
    Path("folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert index_command("--output", "index", *arguments) == 2
    shown = capfd.readouterr()
    [line] = [line for line in shown.err.splitlines() if line.startswith("error: ")]
    assert named in line
    assert "Traceback" not in shown.err
    assert sorted(tmp_path.rglob("*")) == before
