"""The result of `benchmarks.rollout` as markdown: what each engine costs, cell by cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

Row = dict[str, Any]
Cells = dict[tuple[Any, ...], dict[str, Row]]
KEY = ("turn_tokens", "rows", "search_ms", "hidden_size", "layers")
"""What makes a cell; its rows differ by their engine."""
MEASURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("Seconds of processor time", "cpu_seconds", lambda value: f"{value:.1f}"),
    ("Seconds", "wall_seconds", lambda value: f"{value:.1f}"),
    ("Tokens prefilled over needed", "prefilled_over_needed", lambda value: f"{value:.2f}"),
)


def format_result(result: dict[str, Any]) -> str:
    rows = result["rows"]
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    lines = ["# What a rollout costs", "", *_introduction(result)]
    for title, measure, write in MEASURES:
        lines += ["", f"## {title}", "", *_table(rows, engines, lambda row, m=measure, w=write: w(row[m]))]
    if result["rejoin_after"]:
        lines += ["", "## What `rejoin_after` does to `slots_event`", "", *_rejoin_table(result["rejoin_after"])]
    return "\n".join(lines) + "\n"


def _rejoin_table(rows: Sequence[Row]) -> Iterator[str]:
    yield "| search | model | `rejoin_after` | processor time, s | time, s | waiting, s |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        where = f"{row['search_ms']:g} ms | {row['hidden_size']} × {row['layers']} | {row['rejoin_after']}"
        yield f"| {where} | {row['cpu_seconds']:.1f} | {row['wall_seconds']:.1f} | {row['waiting_seconds']:.1f} |"


def by_cell(rows: Sequence[Row]) -> Cells:
    """The rows of each cell, by engine."""
    cells: Cells = {}
    for row in rows:
        cells.setdefault(tuple(row[name] for name in KEY), {})[row["engine"]] = row
    return cells


def _introduction(result: dict[str, Any]) -> Iterator[str]:
    environment = result["environment"]
    yield (
        "`python -m benchmarks.rollout` ([what it does](../rollout/__main__.py)), a cell after the other, each on one "
        "thread; "
        f"{environment['cpus']} processors, torch {environment['torch']}, transformers "
        f"{environment['transformers']}, TRL {environment['trl']}. "
        "Model: hidden size × layers. Search: its mean, log-normal with sigma 0.75 for each query."
    )


def _table(rows: Sequence[Row], engines: Sequence[str], write: Callable[[Row], str]) -> Iterator[str]:
    yield "| turns, tokens | rows | search | model | " + " | ".join(f"`{engine}`" for engine in engines) + " |"
    yield "|---" * (4 + len(engines)) + "|"
    for (tokens, count, milliseconds, hidden, layers), cell in by_cell(rows).items():
        values = " | ".join(write(cell[engine]) if engine in cell else "" for engine in engines)
        yield f"| {tokens} | {count} | {milliseconds:g} ms | {hidden} × {layers} | {values} |"
