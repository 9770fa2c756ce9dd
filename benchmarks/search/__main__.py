"""How fast the search engines are: queries per second of processor time.

    python -m benchmarks.search

Over 100,000 invented passages (`benchmarks.search.world` says how they are made), the best 3 per query:

- the embedded engine and tantivy, as `search_batch` gives passages, against two that give only numbers of passages:
  `bm25s.retrieve` as it comes, over the very same index, and SQLite's FTS5. All get the query as text and cut it into
  the same tokens. Dense search is left out: what it costs is its embedding model;
- the server of this package, asked by 32 threads at once for one query each. The processor time is that of client and
  server together.

The engines are asked in turn, in rounds, each round with queries of its own, so that the machine's moods meet all of
them. Processor time counts all threads. Writes `benchmarks/results/search.json` and `search.md`.
"""

from __future__ import annotations

import json
import os
import platform
import sqlite3
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.search.engines import EMBEDDED, STOCK, Ask, K, build_engines
from benchmarks.search.server import THREADS, ask_at_once, cpu_seconds, served
from benchmarks.search.world import World
from sorl_trl.command_line import Parser, at_least, run_command
from sorl_trl.search import HTTPSearch, write_corpus

RESULTS = Path(__file__).parents[1] / "results"
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
    """The same of a server."""
    rates = []
    with served(index_dir) as server:
        client = HTTPSearch(server.url)
        for start in range(0, len(queries), SERVED_PER_ROUND):
            block = queries[start : start + SERVED_PER_ROUND]
            before = cpu_seconds(server.process)
            ask_at_once(client, block, K)
            rates.append(len(block) / (cpu_seconds(server.process) - before))
    return rates


def measure(passages: int, rounds: int) -> dict[str, Any]:
    """Build everything, compare, and clean up."""
    load_before = os.getloadavg()[0]
    world = World(passages)
    queries = world.queries(rounds * SERVED_PER_ROUND)
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.jsonl"
        write_corpus(world.passages(), corpus)
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
        "environment": _environment() | {"load_average": [load_before, os.getloadavg()[0]]},
    }


def _row(rates: list[float]) -> dict[str, Any]:
    return {
        "queries_per_cpu_second": statistics.median(rates),
        "queries_per_cpu_second_range": [min(rates), max(rates)],
    }


def _environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "sqlite": sqlite3.sqlite_version,
        **{name: _version(name) for name in ("numpy", "bm25s", "tantivy", "httpx2", "fastapi", "uvicorn")},
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def format_table(result: dict[str, Any]) -> str:
    """The result as markdown."""
    before, after = result["environment"]["load_average"]
    low, high = result["embedded_over_stock_range"]
    lines = [
        "# How fast search is",
        "",
        f"{result['passages']:,} passages of about 100 words, k = {result['k']}: medians over {result['rounds']} "
        f"rounds (lowest to highest). {result['environment']['cpus']} processors; load average {before:.1f} before, "
        f"{after:.1f} after.",
        "",
        f"The embedded engine answers **{result['embedded_over_stock']:.1f} times** ({low:.1f} to {high:.1f}) the "
        f"queries of `{STOCK}` per second of processor time.",
        "",
        "| engine | queries per CPU-second |",
        "|---|---|",
        *(_table_row(name, row) for name, row in result["backends"].items()),
        "",
        f"Server: {THREADS} threads ask for one query each at the same time; processor time of client and server.",
    ]
    return "\n".join(lines) + "\n"


def _table_row(name: str, row: dict[str, Any]) -> str:
    slowest, fastest = row["queries_per_cpu_second_range"]
    return f"| {name} | {row['queries_per_cpu_second']:,.0f} ({slowest:,.0f} to {fastest:,.0f}) |"


def main(words: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--passages", type=at_least(100), default=100_000, help="how many to search (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=at_least(1), default=10, help="of each engine (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the two files (default: %(default)s)")
    arguments = parser.parse_args(words)
    result = measure(arguments.passages, arguments.rounds)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "search.json").write_text(json.dumps(result, indent=2) + "\n")
    table = format_table(result)
    (arguments.output / "search.md").write_text(table)
    print(table)


if __name__ == "__main__":
    sys.exit(run_command(main))
