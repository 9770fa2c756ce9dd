"""The arguments that choose what is searched."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

from sorl_trl.checks import SWITCH, check_fields, factory_named
from sorl_trl.search.backend import NoSearch, SearchBackend
from sorl_trl.search.bm25 import BM25Index
from sorl_trl.search.client import HTTPSearch
from sorl_trl.text import without_user

SOURCES = ("index", "corpus", "search_url", "search_backend", "no_search")
"""Arguments that name the source of search results. Exactly one of them must be given."""


class BuiltSearch(NamedTuple):
    """A search engine, and the identity of its content: equal identities give equal answers."""

    backend: SearchBackend
    identity: str


@dataclass
class SearchArguments:
    """Where searches go: one of `SOURCES`, or none if nothing is searched.

    Raises ValueError if several are given.
    """

    index: str | None = field(default=None, metadata={"help": "Folder of an index that `sorl index` built."})
    corpus: str | None = field(
        default=None,
        metadata={"help": "JSONL file of passages. Its index, `<corpus>.index`, is built if missing."},
    )
    search_url: str | None = field(
        default=None, metadata={"help": "Search server, including the path: http://127.0.0.1:8000/retrieve."}
    )
    search_backend: str | None = field(
        default=None,
        metadata={
            "help": "Dotted path of your own engine, such as my_module.MySearch: a class with a method "
            "`search_batch`, or a function that makes one, called without arguments."
        },
    )
    no_search: Annotated[bool, SWITCH] = field(
        default=False, metadata={"help": "Make every search find nothing, to measure what the policy knows by itself."}
    )

    def __post_init__(self) -> None:
        check_fields(self)
        self.check_sources(least=0)
        if self.search_backend:
            factory_named("search_backend", self.search_backend, "search_batch")

    def build_search(self) -> BuiltSearch:
        """Open the engine.

        Raises:
            FileNotFoundError, ValueError: The source is missing or unusable, or none is given. The message gives the
                remedy.
        """
        self.check_sources()
        if self.search_url:
            return BuiltSearch(HTTPSearch(self.search_url), without_user(self.search_url))
        if self.search_backend:
            engine: SearchBackend = factory_named("search_backend", self.search_backend, "search_batch")()
            if not callable(getattr(engine, "search_batch", None)):
                raise ValueError(
                    f"`search_backend` is {self.search_backend!r}, but the {type(engine).__name__} has no method "
                    "`search_batch`."
                )
            return BuiltSearch(engine, self.search_backend)
        if self.no_search:
            return BuiltSearch(NoSearch(), "no_search")
        corpus, index_dir = self.corpus, str(self.index)
        index = BM25Index.open(corpus, f"{corpus}.index") if corpus else BM25Index.load(index_dir)
        return BuiltSearch(index, index.identity)

    def check_sources(self, least: int = 1) -> None:
        """Raise ValueError if several sources are given, or fewer than `least`."""
        given = [name for name in SOURCES if getattr(self, name)]
        if not least <= len(given) <= 1:
            raise ValueError(f"Exactly one of {', '.join(SOURCES)} must be given, got {', '.join(given) or 'none'}.")
