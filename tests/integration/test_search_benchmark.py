"""The search benchmark on few passages: that it runs and what it writes, never how fast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import search
from benchmarks.search_world import KINDS, World

from sorl_trl.search.engines.tokenize import STOP_WORDS, tokenize


@pytest.mark.slow
def test_a_small_run_writes_both_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"PER_ROUND": 6, "LEAST_CPU_S": 0.01, "SERVED_PER_ROUND": 64}.items():
        monkeypatch.setattr(search, name, value)
    search.main(["--passages", "300", "--rounds", "2", "--output", str(tmp_path / "results")])
    result = json.loads((tmp_path / "results" / "search.json").read_text())
    assert (result["passages"], result["k"], result["rounds"]) == (300, 3, 2)
    names = ["bm25", "tantivy", "bm25s.retrieve", "SQLite FTS5", "server"]
    assert list(result["backends"]) == names
    for row in result["backends"].values():
        for figure in ("queries_per_cpu_second", "p50_ms"):
            low, high = row[f"{figure}_range"]
            assert 0 < low <= row[figure] <= high
    low, high = result["embedded_over_stock_range"]
    assert low <= result["embedded_over_stock"] <= high
    assert all(result["embedded_over_stock_by_kind"][kind] > 0 for kind in KINDS)
    assert result["same_best_passage_as_stock"] == 1
    table = (tmp_path / "results" / "search.md").read_text()
    assert capsys.readouterr().out.rstrip("\n") == table.rstrip("\n")
    assert [line.split(" | ")[0].strip("| ") for line in table.splitlines() if line.startswith("| ")][1:] == names


def test_the_world_is_the_same_every_time() -> None:
    first, second = World(50), World(50)
    assert list(first.passages()) == list(second.passages())
    assert first.queries(30) == second.queries(30)
    assert len(set(first.queries(30))) > 25


def test_passages_and_queries_are_as_described() -> None:
    world = World(200)
    texts = [passage.text.split() for passage in world.passages()]
    assert all(60 <= len(words) <= 140 for words in texts)
    stop_words = sum(word in STOP_WORDS for words in texts for word in words) / sum(map(len, texts))
    assert 0.15 < stop_words < 0.3
    queries = world.queries(90)
    assert all(2 <= len(query.split()) <= 8 for query in queries)
    for kind, asked in ((kind, queries[number :: len(KINDS)]) for number, kind in enumerate(KINDS)):
        homes = [[words for words in texts if set(query.split()) <= set(words)] for query in asked]
        assert all(homes), kind
        without_stop_words = all(len(tokenize(query)) == len(query.split()) for query in asked)
        assert without_stop_words == (kind != "span")
