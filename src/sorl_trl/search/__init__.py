"""Search engines for agents: the interface, BM25, a client, and a server."""

from sorl_trl.search.arguments import BuiltSearch, SearchArguments
from sorl_trl.search.backend import NoSearch, RetryPolicy, SearchBackend, SearchError, SearchUnavailable
from sorl_trl.search.bm25 import BM25Index, IndexOutdated
from sorl_trl.search.client import HTTPSearch, MalformedResponse
from sorl_trl.search.corpus import Corpus, CorpusError, write_corpus

__all__ = [
    "BM25Index",
    "BuiltSearch",
    "Corpus",
    "CorpusError",
    "HTTPSearch",
    "IndexOutdated",
    "MalformedResponse",
    "NoSearch",
    "RetryPolicy",
    "SearchArguments",
    "SearchBackend",
    "SearchError",
    "SearchUnavailable",
    "write_corpus",
]
