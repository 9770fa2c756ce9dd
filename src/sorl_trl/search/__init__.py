"""Search engines for agents: what the rollout asks of one, and BM25 over a corpus file as the embedded default."""

from sorl_trl.search.backend import SearchBackend, SearchError, SearchUnavailable
from sorl_trl.search.bm25 import BM25Index
from sorl_trl.search.corpus import Corpus, CorpusError, write_corpus
from sorl_trl.search.manifest import IndexCorrupted, IndexOutdated

__all__ = [
    "BM25Index",
    "Corpus",
    "CorpusError",
    "IndexCorrupted",
    "IndexOutdated",
    "SearchBackend",
    "SearchError",
    "SearchUnavailable",
    "write_corpus",
]
