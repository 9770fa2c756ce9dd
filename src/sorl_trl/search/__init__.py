"""Search engines for agents: the interface, three embedded engines, a client and a server, and a cache."""

from sorl_trl.search.arguments import BuiltSearch, SearchArguments
from sorl_trl.search.backend import NoSearch, SearchBackend, SearchError, SearchUnavailable
from sorl_trl.search.cache import CachedSearch, CacheError
from sorl_trl.search.client import HTTPSearch
from sorl_trl.search.corpus import Corpus, CorpusError, write_corpus
from sorl_trl.search.engines import open_index
from sorl_trl.search.engines.bm25 import BM25Index
from sorl_trl.search.engines.dense import DenseIndex, DenseOptions
from sorl_trl.search.engines.saved import IndexCorrupted, IndexOutdated, SavedIndex
from sorl_trl.search.engines.tantivy import TantivyIndex
from sorl_trl.search.retry import RetryPolicy
from sorl_trl.search.wire import MalformedResponse

__all__ = [
    "BM25Index",
    "BuiltSearch",
    "CacheError",
    "CachedSearch",
    "Corpus",
    "CorpusError",
    "DenseIndex",
    "DenseOptions",
    "HTTPSearch",
    "IndexCorrupted",
    "IndexOutdated",
    "MalformedResponse",
    "NoSearch",
    "RetryPolicy",
    "SavedIndex",
    "SearchArguments",
    "SearchBackend",
    "SearchError",
    "SearchUnavailable",
    "TantivyIndex",
    "open_index",
    "write_corpus",
]
