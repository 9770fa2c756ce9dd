"""Search engines for agents: what the rollout asks of one, three to embed, one over HTTP, and what goes around one."""

from sorl_trl.search.arguments import BuiltSearch, SearchArguments
from sorl_trl.search.backend import SearchBackend, SearchError, SearchUnavailable
from sorl_trl.search.bm25 import BM25Index
from sorl_trl.search.breaker import CircuitBreaker, CircuitOpen
from sorl_trl.search.cache import CachedSearch, CacheError, CacheStore, MemoryStore, SQLiteStore
from sorl_trl.search.coalesce import CoalescingSearch
from sorl_trl.search.corpus import Corpus, CorpusError, write_corpus
from sorl_trl.search.dense import DenseIndex
from sorl_trl.search.encoder import DenseOptions
from sorl_trl.search.engines import build_index, open_index
from sorl_trl.search.http import HTTPSearch
from sorl_trl.search.manifest import IndexCorrupted, IndexOutdated
from sorl_trl.search.no_search import NoSearch
from sorl_trl.search.replay import NotRecorded, RecordingError, RecordingSearch, ReplayedSearch
from sorl_trl.search.retry import RetriesExhausted, RetryingSearch, RetryPolicy
from sorl_trl.search.saved import SavedIndex
from sorl_trl.search.tantivy_index import TantivyIndex
from sorl_trl.search.wire import REQUEST_FORMATS, MalformedResponse

__all__ = [
    "REQUEST_FORMATS",
    "BM25Index",
    "BuiltSearch",
    "CacheError",
    "CacheStore",
    "CachedSearch",
    "CircuitBreaker",
    "CircuitOpen",
    "CoalescingSearch",
    "Corpus",
    "CorpusError",
    "DenseIndex",
    "DenseOptions",
    "HTTPSearch",
    "IndexCorrupted",
    "IndexOutdated",
    "MalformedResponse",
    "MemoryStore",
    "NoSearch",
    "NotRecorded",
    "RecordingError",
    "RecordingSearch",
    "ReplayedSearch",
    "RetriesExhausted",
    "RetryPolicy",
    "RetryingSearch",
    "SQLiteStore",
    "SavedIndex",
    "SearchArguments",
    "SearchBackend",
    "SearchError",
    "SearchUnavailable",
    "TantivyIndex",
    "build_index",
    "open_index",
    "write_corpus",
]
