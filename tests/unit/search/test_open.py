"""An index is opened for the corpus it was built from, and no other."""

from __future__ import annotations

import copy
import gc
import json
import pickle
from pathlib import Path

import pytest

from sorl_trl.search import BM25Index, IndexOutdated
from sorl_trl.search.engines.bm25 import BM25Index as Engine


def write(path: Path, *texts: str) -> Path:
    rows = [{"id": str(i), "title": "", "content": text} for i, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_builds_then_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write(tmp_path / "corpus.jsonl", "Oslo lies in Norway")
    built = BM25Index.open(corpus, tmp_path / "index")
    monkeypatch.setattr(Engine, "build", lambda *_: pytest.fail("built again"))
    loaded = BM25Index.open(corpus, tmp_path / "index")
    assert built.search_batch(["oslo"], 1) == loaded.search_batch(["oslo"], 1)


def test_a_changed_corpus_is_named(tmp_path: Path) -> None:
    corpus = write(tmp_path / "corpus.jsonl", "Oslo lies in Norway")
    BM25Index.open(corpus, tmp_path / "index")
    write(corpus, "Lima lies in Peru")
    with pytest.raises(IndexOutdated, match=r"index .*index: .*another content than .*corpus\.jsonl"):
        BM25Index.open(corpus, tmp_path / "index")


def test_two_builds_at_once_leave_one_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process, on a shared disk, finishes while ours is still building."""
    corpus = write(tmp_path / "corpus.jsonl", "Oslo lies in Norway")
    rename = Path.rename

    def overtaken(self: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        BM25Index.build(corpus, target, show_progress=False)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", overtaken)
    index = BM25Index.build(corpus, tmp_path / "index", show_progress=False)
    assert [passage.id for passage in index.search_batch(["norway"], 1)[0]] == ["0"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "index"]


def test_a_copy_reads_its_own_file(tmp_path: Path) -> None:
    """Not whatever file has the descriptor's number by then."""
    index = BM25Index.open(write(tmp_path / "corpus.jsonl", "Oslo lies in Norway"), tmp_path / "index")
    twin = pickle.loads(pickle.dumps(index))
    copied = copy.deepcopy(index)
    del index
    gc.collect()
    other = write(tmp_path / "other.jsonl", "secret")
    with other.open():
        for searched in (twin, copied):
            assert searched.search_batch(["norway"], 1)[0][0].text == "Oslo lies in Norway"
