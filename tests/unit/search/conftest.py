from __future__ import annotations

import pytest
from tests.unit.search.backends import PASSAGES

from sorl_trl.search import BM25Index, write_corpus


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
