"""The engines that `benchmarks.search` compares in one process, over the same passages and the same tokens."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import bm25s

from sorl_trl.search import BM25Index, Corpus, SearchBackend, TantivyIndex
from sorl_trl.search.lexical import tokenize

Ask = Callable[[Sequence[str]], list[list[int]]]
"""The numbers of the best passages of each query, best first."""
K = 3
EMBEDDED, STOCK = "bm25", "bm25s.retrieve"


def build_engines(corpus: Path, folder: Path) -> dict[str, Ask]:
    """Every engine that is installed, each with its own files in `folder`.

    The first two also read the passages that they find; the others do not.
    """
    engines = {EMBEDDED: _backend(BM25Index.build(corpus, folder / "bm25", show_progress=False))}
    if find_spec("tantivy"):
        engines["tantivy"] = _backend(TantivyIndex.build(corpus, folder / "tantivy", show_progress=False))
    engines[STOCK] = _stock(folder / "bm25")
    engines["SQLite FTS5"] = _sqlite(Corpus(corpus), folder / "fts5.sqlite")
    return engines


def _backend(backend: SearchBackend) -> Ask:
    return lambda queries: [[int(hit.id) for hit in hits] for hits in backend.search_batch(queries, K)]


def _stock(index_dir: Path) -> Ask:
    """bm25s as it comes, over the files that the embedded engine wrote with it, read into memory."""
    scorer = bm25s.BM25.load(index_dir)

    def ask(queries: Sequence[str]) -> list[list[int]]:
        tokens = [tokenize(query) for query in queries]
        found, _ = scorer.retrieve(tokens, k=K, show_progress=False, backend_selection="numpy")
        return [hits.tolist() for hits in found]

    return ask


def _sqlite(corpus: Corpus, path: Path) -> Ask:
    """A full-text table of the tokens; a hit holds any of the query's, the best by BM25 first."""
    connection = sqlite3.connect(path)
    connection.execute("CREATE VIRTUAL TABLE passages USING fts5(tokens)")
    rows = ((i, " ".join(tokenize(f"{passage.title}\n{passage.text}"))) for i, passage in enumerate(corpus))
    with connection:
        connection.executemany("INSERT INTO passages(rowid, tokens) VALUES (?, ?)", rows)
        connection.execute("INSERT INTO passages(passages) VALUES ('optimize')")

    def search(query: str) -> list[int]:
        tokens = sorted(set(tokenize(query)))
        if not tokens:
            return []
        match = " OR ".join(f'"{token}"' for token in tokens)
        statement = "SELECT rowid FROM passages WHERE passages MATCH ? ORDER BY bm25(passages) LIMIT ?"
        return [row[0] for row in connection.execute(statement, (match, K))]

    return lambda queries: [search(query) for query in queries]
