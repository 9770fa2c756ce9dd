"""Where a script searches, as its arguments say, with all that goes around the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

from sorl_trl.checks import SWITCH, Checked, OneOf, Problem
from sorl_trl.search.around.breaker import CircuitBreaker
from sorl_trl.search.around.cache import CachedSearch, SQLiteStore
from sorl_trl.search.around.replay import RecordingSearch, ReplayedSearch
from sorl_trl.search.around.retry import RetryingSearch
from sorl_trl.search.backend import SearchBackend
from sorl_trl.search.engines.bm25 import BM25Index
from sorl_trl.search.engines.choice import open_index
from sorl_trl.search.engines.manifest import fingerprint
from sorl_trl.search.engines.tantivy import TantivyIndex
from sorl_trl.search.no_search import NoSearch
from sorl_trl.search.server.client import HTTPSearch, server_identity, url_refusal
from sorl_trl.search.server.wire import REQUEST_FORMATS
from sorl_trl.text import without_user

SOURCES = ("index", "corpus", "search_url", "no_search", "replay")
"""Arguments that say what answers the searches: exactly one of them is given."""
COMPANIONS: Mapping[str, tuple[str, ...]] = {
    "search_engine": ("corpus",),
    "search_request": ("search_url",),
    "search_cache": ("index", "corpus", "search_url"),
}
"""Argument -> the sources that can use it."""
CORPUS_ENGINES: Mapping[str, tuple[type[BM25Index] | type[TantivyIndex], str]] = {
    "bm25": (BM25Index, "index"),
    "tantivy": (TantivyIndex, "tantivy"),
}
"""Engine that needs nothing but a corpus -> its class, and what is added to the corpus's name for its index."""


def override_source(words: Sequence[str]) -> list[str]:
    """A command line on which a source takes the place of the one in its `--config`, and of what only that one uses.

    What the command line itself gives is left as it is.
    """
    given = {word.lstrip("-").partition("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    if given.isdisjoint(SOURCES):
        return list(words)
    useless = [name for name, sources in COMPANIONS.items() if given.isdisjoint(sources)]
    return [*words, *(f"--{name}={_unset(name)}" for name in (*SOURCES, *useless) if name not in given)]


def _unset(name: str) -> str:
    """How a command line spells the default of an argument; the empty string is as good as None."""
    default = getattr(SearchArguments, name)
    return "" if default is None else str(default).lower()


class BuiltSearch(NamedTuple):
    """A search engine with a name for what it searches: equal names give equal answers."""

    backend: SearchBackend
    identity: str


@dataclass
class SearchArguments(Checked):
    """Say where searches go: exactly one of `index`, `corpus`, `search_url`, `no_search` and `replay`.

    Raises ValueError for none or several of them, for a file or directory that is not there, and for an argument that
    the chosen one could not use.
    """

    index: str | None = field(
        default=None, metadata={"help": "Directory of an index, of any engine; its manifest says which."}
    )
    corpus: str | None = field(
        default=None,
        metadata={"help": "JSONL file of passages. Its index is `<corpus>.index`, built where missing."},
    )
    search_engine: Annotated[str, OneOf(tuple(CORPUS_ENGINES))] = field(
        default="bm25",
        metadata={
            "help": "Engine of `corpus`: bm25 up to about a million passages, tantivy beyond, whose index is "
            "`<corpus>.tantivy`.",
        },
    )
    search_url: str | None = field(
        default=None, metadata={"help": "Search server, with its path: http://127.0.0.1:8000/retrieve."}
    )
    search_request: Annotated[str, OneOf(tuple(REQUEST_FORMATS))] = field(
        default="search_r1",
        metadata={"help": f"How the server at `search_url` wants to be asked: {', '.join(REQUEST_FORMATS)}."},
    )
    no_search: Annotated[bool, SWITCH] = field(
        default=False, metadata={"help": "No search finds anything: what the policy just knows."}
    )
    replay: str | None = field(
        default=None, metadata={"help": "File of recorded searches, which answers instead of an engine."}
    )
    record: str | None = field(
        default=None,
        metadata={
            "help": "File to record all searches in, for `replay`. Of several processes, those after the first write "
            "`<record>.1`, `<record>.2` and so on: append them to the first to replay all."
        },
    )
    search_cache: str | None = field(
        default=None, metadata={"help": "SQLite file that keeps answers from run to run; processes may share it."}
    )

    def problems(self) -> Iterator[Problem]:
        given = [name for name in SOURCES if getattr(self, name)]
        if len(given) != 1:
            what = f"Exactly one of {', '.join(SOURCES)} must be given, got {', '.join(given) or 'none'}."
            yield Problem(given[-1] if given else "corpus", what)
        yield from super().problems()
        yield from self._missing_files()
        if self.search_engine != "bm25" and not self.corpus:
            what = f"`search_engine` is {self.search_engine!r}, but there is no `corpus` to index."
            yield Problem("search_engine", what)
        if self.search_request != "search_r1" and not self.search_url:
            what = f"`search_request` is {self.search_request!r}, but there is no `search_url` to ask."
            yield Problem("search_request", what)
        if self.search_url and (refusal := url_refusal(self.search_url)):
            yield Problem("search_url", f"`search_url`: {refusal}.")
        if self.search_cache and (self.no_search or self.replay):
            source = "no_search" if self.no_search else "replay"
            what = f"`search_cache` is {self.search_cache!r}, but {source} leaves nothing to keep."
            yield Problem("search_cache", what)

    def _missing_files(self) -> Iterator[Problem]:
        for name in ("corpus", "replay"):
            path = getattr(self, name)
            if path and not Path(path).is_file():
                yield Problem(name, f"`{name}` is {path!r}, but there is no such file.")
        if self.index and not Path(self.index).is_dir():
            what = f"`index` is {self.index!r}, but there is no such directory; build the index first."
            yield Problem("index", what)
        for name in ("record", "search_cache"):
            path = getattr(self, name)
            if path and not Path(path).parent.is_dir():
                what = f"`{name}` is {path!r}, but there is no directory {str(Path(path).parent)!r}."
                yield Problem(name, what)

    def build_search(self, rank: int = 0) -> BuiltSearch:
        """Open the engine and put around it what the arguments say, in the order that `CachedSearch` gives.

        Args:
            rank: Of this process, from 0: each records into a file of its own.

        Raises:
            CorpusError, IndexCorrupted, IndexOutdated, RecordingError, CacheError, ValueError: What is there cannot
                be used; the message says what to do.
        """
        backend, identity = self._engine()
        if self.search_cache:
            backend = CachedSearch(backend, identity, SQLiteStore(self.search_cache))
        if self.record:
            backend = RecordingSearch(backend, f"{self.record}.{rank}" if rank else self.record)
        return BuiltSearch(backend, identity)

    def _engine(self) -> BuiltSearch:
        if self.search_url:
            client = HTTPSearch(self.search_url, self.search_request)
            backend = CircuitBreaker(RetryingSearch(client), failures=1)
            identity = server_identity(self.search_url) or f"{self.search_request} {without_user(self.search_url)}"
            return BuiltSearch(backend, identity)
        if self.replay:
            return BuiltSearch(ReplayedSearch(self.replay), f"replay-{fingerprint(Path(self.replay))['sha256']}")
        if self.no_search:
            return BuiltSearch(NoSearch(), "no_search")
        if self.corpus:
            engine, ending = CORPUS_ENGINES[self.search_engine]
            index = engine.open(self.corpus, f"{self.corpus}.{ending}")
            return BuiltSearch(index, index.identity)
        saved = open_index(str(self.index))
        return BuiltSearch(saved, saved.identity)
