from __future__ import annotations

import pytest

from sorl_trl.search import BM25Index, write_corpus
from sorl_trl.types import Passage

PASSAGES = [
    Passage("fr", "France", "The capital of France is Paris."),
    Passage("it", "Italy", "The capital of Italy is Rome; its river is the Tiber."),
    Passage("cw", "Curaçao", "Willemstad is the largest town."),
    Passage("jp", "東京", "東京は日本の首都。"),
    Passage("twin1", "Twin", "Gemini stars"),
    Passage("twin2", "Twin", "Gemini stars"),
    Passage("blank", "", "?!"),
]


@pytest.fixture(scope="session")
def corpus_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    write_corpus(PASSAGES, path)
    return path


@pytest.fixture(scope="session")
def index_dir(corpus_path, tmp_path_factory):
    directory = tmp_path_factory.mktemp("indexes") / "index"
    BM25Index.build(corpus_path, directory, show_progress=False)
    return directory


@pytest.fixture(scope="session")
def index(index_dir):
    return BM25Index.load(index_dir)
