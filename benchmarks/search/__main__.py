"""How fast the search engines are: queries per second of processor time.

    python -m benchmarks.search

Over 100,000 invented passages, the same ones everywhere, the best 3 per query:

- the embedded engine and tantivy, as `search_batch` gives passages, against two that give only numbers of passages:
  `bm25s.retrieve` as it comes, over the very same index, and SQLite's FTS5. All get the query as text and cut it into
  the same tokens. Dense search is left out: what it costs is its embedding model;
- the server of this package, asked by 32 threads at once for one query each. The processor time is that of client and
  server together.

The engines are asked in turn, in rounds, each round with queries of its own, so that the machine's moods meet all of
them. Processor time counts all threads. Writes `benchmarks/results/search.json` and `search.md`.

A vocabulary of 200,000 words is drawn from by the law of Zipf and Mandelbrot: the word of rank r = 1, 2, … has a
probability in proportion to 1 / (r + 2.7). The stop words of the package have the first ranks, as they have in
English, and make up about a fifth of the text; all other words are syllables strung together. A passage has 60 to 140
words (uniform, 100 on average), each drawn by itself: unlike in real text no word is the more likely for having been
used before. Nothing in it is about anything, so that it tells how fast an engine is and not how good.

A query has 2 to 8 words (uniform) of one passage, of one of three kinds in turn:

- `span`: words that follow each other, stop words among them, as a policy that copies what it has read;
- `words`: words from all over the passage without stop words, as a policy that strings keywords together;
- `rare`: the rarest words of the passage, as a question that names its entities.
"""

from __future__ import annotations

import json
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
import numpy.typing as npt
import psutil

from benchmarks.common import RESULTS, SORL, table
from sorl_trl.command_line import Parser, at_least, run_command
from sorl_trl.search import BM25Index, HTTPSearch, SearchBackend, TantivyIndex, write_corpus
from sorl_trl.search.index import Corpus
from sorl_trl.search.lexical import STOP_WORDS, tokenize
from sorl_trl.types import Passage

SEED = 0
VOCABULARY = 200_000
SHIFT = 2.7
SHORTEST, LONGEST = 60, 140
KINDS = ("span", "words", "rare")
SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnpqrstvwxz" for vowel in "aeiou"]

Ranks = npt.NDArray[np.int64]


class Text:
    """Invented passages as ranks of words, in the order of their numbers."""

    def __init__(self, passages: int) -> None:
        """Draw so many passages, from a fixed seed."""
        generator = np.random.default_rng(SEED)
        lengths = generator.integers(SHORTEST, LONGEST + 1, passages)
        cumulative = np.cumsum(1 / (np.arange(1, VOCABULARY + 1) + SHIFT))
        draws = generator.random(int(lengths.sum())) * cumulative[-1]
        self._ranks: list[Ranks] = np.split(np.searchsorted(cumulative, draws, side="right"), np.cumsum(lengths)[:-1])
        self._words = [*sorted(STOP_WORDS), *(_word(number) for number in range(VOCABULARY - len(STOP_WORDS)))]

    def passages(self) -> Iterator[Passage]:
        """Every passage, untitled; its id is its number, from 0."""
        return (Passage(str(number), "", self._text(ranks)) for number, ranks in enumerate(self._ranks))

    def queries(self, number: int) -> list[str]:
        """So many queries, from a fixed seed, the kinds in turn."""
        generator = np.random.default_rng(SEED + 1)
        return [self._query(generator, KINDS[i % len(KINDS)]) for i in range(number)]

    def _query(self, generator: np.random.Generator, kind: str) -> str:
        ranks = self._ranks[generator.integers(len(self._ranks))]
        length = int(generator.integers(2, 9))
        if kind == "span":
            start = generator.integers(len(ranks) - length + 1)
            return self._text(ranks[start : start + length])
        content = np.unique(ranks[ranks >= len(STOP_WORDS)])  # sorted: the rarest are the last
        return self._text(content[-length:] if kind == "rare" else generator.permutation(content)[:length])

    def _text(self, ranks: Ranks) -> str:
        return " ".join([self._words[rank] for rank in ranks])


def _word(number: int) -> str:
    """Two syllables or more, no two numbers alike."""
    number += len(SYLLABLES)
    word = ""
    while number:
        number, digit = divmod(number, len(SYLLABLES))
        word = SYLLABLES[digit] + word
    return word


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


THREADS = 32


@contextmanager
def served(index_dir: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The address and the process of a server, which ends with the block."""
    command = [*SORL, "serve", "--index", str(index_dir), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            greeting = server.stdout.readline()
            if not greeting:
                raise RuntimeError(f"the server did not start: exit code {server.wait()}")
            yield greeting.split()[-1], psutil.Process(server.pid)
        finally:
            server.terminate()


PER_ROUND = 255
"""Queries in a batch, of each round: their postings are more than the nearer caches hold."""
LEAST_CPU_S = 0.2
"""A batch is asked again and again for so long: the clocks of some machines tick in hundredths of a second."""
SERVED_PER_ROUND = 640

Rates = dict[str, list[float]]
"""Engine -> queries per second of processor time, of each round."""


def compare_engines(engines: dict[str, Ask], queries: Sequence[str]) -> Rates:
    """Queries per second of processor time, of each round."""
    rates: Rates = defaultdict(list)
    for number, start in enumerate(range(0, len(queries), PER_ROUND)):
        block = queries[start : start + PER_ROUND]
        for name in sorted(engines, reverse=number % 2 == 1):
            rates[name].append(_queries_per_cpu_second(engines[name], block))
    return rates


def _queries_per_cpu_second(ask: Ask, queries: Sequence[str]) -> float:
    asked, spent = 0, 0.0
    started = time.process_time()
    while spent < LEAST_CPU_S:
        ask(queries)
        asked += len(queries)
        spent = time.process_time() - started
    return asked / spent


def compare_clients(index_dir: Path, queries: Sequence[str]) -> list[float]:
    """The same of a server that `THREADS` ask for one query each; client and server together."""

    def spent() -> float:
        times = process.cpu_times()
        return time.process_time() + float(times.user + times.system)

    rates = []
    with served(index_dir) as (url, process), ThreadPoolExecutor(THREADS) as pool:
        client = HTTPSearch(url)
        for start in range(0, len(queries), SERVED_PER_ROUND):
            block = queries[start : start + SERVED_PER_ROUND]
            before = spent()
            list(pool.map(lambda query: client.search_batch([query], K), block))
            rates.append(len(block) / (spent() - before))
    return rates


def measure(passages: int, rounds: int) -> dict[str, Any]:
    """Build everything, compare, and clean up."""
    load_before = os.getloadavg()[0]
    text = Text(passages)
    queries = text.queries(rounds * SERVED_PER_ROUND)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        write_corpus(text.passages(), corpus)
        engines = build_engines(corpus, Path(folder))
        rates = compare_engines(engines, queries[: rounds * PER_ROUND])
        rates["server"] = compare_clients(Path(folder) / "bm25", queries)
    ratios = [ours / stock for ours, stock in zip(rates[EMBEDDED], rates[STOCK], strict=True)]
    return {
        "embedded_over_stock": statistics.median(ratios),
        "embedded_over_stock_range": [min(ratios), max(ratios)],
        "backends": {name: _row(rates[name]) for name in [*engines, "server"]},
        "passages": passages,
        "k": K,
        "rounds": rounds,
        "environment": {"cpus": os.cpu_count(), "load_average": [load_before, os.getloadavg()[0]]},
    }


def _row(rates: list[float]) -> dict[str, Any]:
    return {
        "queries_per_cpu_second": statistics.median(rates),
        "queries_per_cpu_second_range": [min(rates), max(rates)],
    }


REPORT = """# How fast search is

{passages:,} passages of about 100 words, k = {k}: medians over {rounds} rounds (lowest to highest). {cpus} processors;
load average {before:.1f} before, {after:.1f} after.

The embedded engine answers **{ratio:.1f} times** ({low:.1f} to {high:.1f}) the queries of `{stock}` per second of
processor time.

{rates}
Server: {threads} threads ask for one query each at the same time; processor time of client and server.
"""


def report(result: dict[str, Any]) -> str:
    before, after = result["environment"]["load_average"]
    low, high = result["embedded_over_stock_range"]
    rates = []
    for name, row in result["backends"].items():
        slowest, fastest = row["queries_per_cpu_second_range"]
        rates.append([name, f"{row['queries_per_cpu_second']:,.0f} ({slowest:,.0f} to {fastest:,.0f})"])
    return REPORT.format(
        **{**result, "cpus": result["environment"]["cpus"], "before": before, "after": after, "stock": STOCK},
        **{"ratio": result["embedded_over_stock"], "low": low, "high": high, "threads": THREADS},
        rates=table(["engine", "queries per CPU-second"], rates),
    )


def main(words: Sequence[str]) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--passages", type=at_least(100), default=100_000, help="to search (default: %(default)s)")
    parser.add_argument("--rounds", type=at_least(1), default=10, help="of each engine (default: %(default)s)")
    arguments = parser.parse_args(words)
    result = measure(arguments.passages, arguments.rounds)
    (RESULTS / "search.json").write_text(json.dumps(result, indent=2) + "\n")
    (RESULTS / "search.md").write_text(report(result))
    print(report(result))


if __name__ == "__main__":
    sys.exit(run_command(main))
