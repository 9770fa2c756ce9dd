"""Search engines for agents: the interface, three embedded engines, a client, a server, and a cache."""

from sorl_trl.search.arguments import BuiltSearch, SearchArguments, open_index
from sorl_trl.search.backend import NoSearch, RetryPolicy, SearchBackend, SearchError, SearchUnavailable
from sorl_trl.search.client import CachedSearch, CacheError, HTTPSearch, MalformedResponse
from sorl_trl.search.dense import DenseIndex, DenseOptions
from sorl_trl.search.index import Corpus, CorpusError, IndexOutdated, SavedIndex, write_corpus
from sorl_trl.search.lexical import BM25Index, TantivyIndex

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
