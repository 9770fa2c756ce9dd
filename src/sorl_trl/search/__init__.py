"""Search engines for agents: what the rollout asks of one, three to embed, one over HTTP, and what goes around one."""

from sorl_trl.search.arguments import BuiltSearch, SearchArguments
from sorl_trl.search.around.breaker import CircuitBreaker, CircuitOpen
from sorl_trl.search.around.cache import CachedSearch, CacheError, CacheStore, MemoryStore, SQLiteStore
from sorl_trl.search.around.coalesce import CoalescingSearch
from sorl_trl.search.around.replay import NotRecorded, RecordingError, RecordingSearch, ReplayedSearch
from sorl_trl.search.around.retry import RetriesExhausted, RetryingSearch, RetryPolicy
from sorl_trl.search.backend import SearchBackend, SearchError, SearchUnavailable
from sorl_trl.search.corpus import Corpus, CorpusError, write_corpus
from sorl_trl.search.engines.bm25 import BM25Index
from sorl_trl.search.engines.choice import build_index, open_index
from sorl_trl.search.engines.dense import DenseIndex
from sorl_trl.search.engines.encoder import DenseOptions
from sorl_trl.search.engines.manifest import IndexCorrupted, IndexOutdated
from sorl_trl.search.engines.saved import SavedIndex
from sorl_trl.search.engines.tantivy import TantivyIndex
from sorl_trl.search.no_search import NoSearch
from sorl_trl.search.server.client import HTTPSearch
from sorl_trl.search.server.wire import REQUEST_FORMATS, MalformedResponse

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
