"""The result of `benchmarks.rollout` as markdown: what each engine costs, cell by cell, and the targets."""

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
    ("Seconds of waiting for search", "waiting_seconds", lambda value: f"{value:.1f}"),
    ("Tokens prefilled over needed", "prefilled_over_needed", lambda value: f"{value:.2f}"),
    ("Row-steps over needed", "row_steps_over_needed", lambda value: f"{value:.2f}"),
    ("Memory at the peak, MB", "peak_memory_mb", lambda value: f"{value:.0f}"),
)
OURS = "slots_event"


def format_result(result: dict[str, Any]) -> str:
    rows = result["rows"]
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    lines = ["# What a rollout costs", "", *_introduction(result, engines)]
    if targets := list(check_targets(result)):
        lines += ["", "## Targets", "", "| target | measured | |", "|---|---|---|"]
        lines += [f"| {what} | {measured} | {'met' if met else '**missed**'} |" for what, measured, met in targets]
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


def check_targets(result: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """What was to be reached, what was, and whether that is enough; only what the rows allow to tell."""
    cells = by_cell(result["rows"])
    hard = {key: cell for key, cell in cells.items() if (key[1], key[2]) == (64, 500.0)}
    yield from _at_least(4, "less processor time than `lockstep`, 64 rows, 0.5 s", "cpu_seconds", "lockstep", hard)
    yield from _at_least(6, "less time than `trl_loop`, 64 rows, 0.5 s", "wall_seconds", "trl_loop", hard)
    slots = [row for row in result["rows"] if row["engine"].startswith("slots")]
    for what, measure in (
        ("prefilled over needed, at most 1.0", "prefilled_over_needed"),
        ("no row-step on a row that has ended", "row_steps_over_needed"),
    ):
        if slots:
            most = max(row[measure] for row in slots)
            yield f"`slots_…`: {what}", f"at most {most:.3f}", most <= 1
    for measure, what in (("wall_seconds", "time"), ("cpu_seconds", "processor time")):
        yield from _at_least(1, f"never more {what} than `lockstep`", measure, "lockstep", cells, worst=True)
    if quickstart := result["quickstart"]:
        ratio = quickstart["cpu_ratio"]
        yield "quickstart's rollout: 1.7 × less processor time than `lockstep`", f"{ratio:.2f} ×", ratio >= 1.7


def _at_least(
    factor: float, what: str, measure: str, baseline: str, cells: Cells, worst: bool = False
) -> Iterator[tuple[str, str, bool]]:
    """One line per cell, or for the worst of them: the baseline's measure over ours."""
    ratios = {
        key: cell[baseline][measure] / cell[OURS][measure]
        for key, cell in cells.items()
        if baseline in cell and OURS in cell
    }
    if worst and ratios:
        key = min(ratios, key=lambda key: ratios[key])
        yield f"`{OURS}`: {what}", f"{ratios[key]:.2f} × at the worst ({_name(key)})", ratios[key] >= factor
    elif not worst:
        for key, ratio in ratios.items():
            yield f"`{OURS}`: {factor} × {what} ({_name(key)})", f"{ratio:.1f} ×", ratio >= factor


def by_cell(rows: Sequence[Row]) -> Cells:
    """The rows of each cell, by engine."""
    cells: Cells = {}
    for row in rows:
        cells.setdefault(tuple(row[name] for name in KEY), {})[row["engine"]] = row
    return cells


def _name(key: tuple[Any, ...]) -> str:
    tokens, rows, milliseconds, hidden, layers = key
    return f"{rows} rows, turns of {tokens}, {milliseconds:g} ms, {hidden} × {layers}"


def _introduction(result: dict[str, Any], engines: Sequence[str]) -> Iterator[str]:
    environment = result["environment"]
    yield (
        "`python -m benchmarks.rollout` ([what it does](../rollout.py)), a cell after the other, each on one thread; "
        f"{environment['cpus']} processors, torch {environment['torch']}, transformers "
        f"{environment['transformers']}, TRL {environment['trl']}. "
        "Model: hidden size × layers. Search: its mean, log-normal with sigma 0.75 for each query."
    )
    for engine, reason in result["left_out"].items():
        if engine not in engines:
            yield from ("", f"`{engine}` is left out: {reason}.")
    if quickstart := result["quickstart"]:
        yield from ("", _quickstart(quickstart))


def _quickstart(measured: dict[str, Any]) -> str:
    old, new = measured["lockstep"], measured["slots_event"]
    return (
        f"The rollout of the quickstart ({measured['rows']} trajectories, its own search engine; medians of "
        f"{measured['rounds']} rounds in turn): {old['cpu_seconds']:.2f} s of processor time in `lockstep`, "
        f"{new['cpu_seconds']:.2f} s in `slots_event`, **{measured['cpu_ratio']:.2f} × less**."
    )


def _table(rows: Sequence[Row], engines: Sequence[str], write: Callable[[Row], str]) -> Iterator[str]:
    yield "| turns, tokens | rows | search | model | " + " | ".join(f"`{engine}`" for engine in engines) + " |"
    yield "|---" * (4 + len(engines)) + "|"
    for (tokens, count, milliseconds, hidden, layers), cell in by_cell(rows).items():
        values = " | ".join(write(cell[engine]) if engine in cell else "" for engine in engines)
        yield f"| {tokens} | {count} | {milliseconds:g} ms | {hidden} × {layers} | {values} |"
