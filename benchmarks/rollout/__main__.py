"""What a rollout costs: TRL's loop over tools, lock-step, and engines that keep what they have read, on one workload.

    python -m benchmarks.rollout                                  # the grid: hours on two cores
    python -m benchmarks.rollout --go-on                          # what is not in the files yet

- `trl_loop`: `trl.GRPOTrainer` with a tool. All rows generate with `model.generate` from their whole context, in every
  turn, and when all have ended their turn, they search one after the other.
- `lockstep`: our collector with any `Generator`, here `HFGenerator`. Rows generate likewise, and search in one batch.
- `slots_event`: our collector with `SlotEngine`. Only what is new goes through the model. No row waits for another:
  each searches when it has ended its turn.
- `endpoint`: the same engine, and agents that make an API call for each turn, over `http.client`. `engine_alone` is
  `slots_event` once more, measured beside it.

`benchmarks.rollout.script` draws turns, observations and searches: the same ones for all engines. Each
cell runs in a process of its own on one thread. Of the rollout alone it measures

- `cpu_seconds` and `wall_seconds`;
- `endpoint_ms_per_call`: milliseconds of processor time that the endpoint's thread takes for an API call;
- `prefilled_over_needed`: tokens of contexts that went through the model, over those that must if each token of a
  trajectory is computed once (prompt, observations, and the last token of every turn that one follows);
- `waiting_seconds`: in which something was being searched for and nothing generated.

Writes `benchmarks/results/rollout.json` and `rollout.md`, after each cell anew.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import product
from typing import Any

from benchmarks.common import RESULTS, alone, table
from benchmarks.rollout.engines import ENGINES, measure
from benchmarks.rollout.script import Cell
from sorl_trl.command_line import Parser, run_command

FILE = RESULTS / "rollout.json"
ROWS = (64, 128)
TURN_TOKENS = ((10, 150), (100, 500))
SEARCH_MS = (0.0, 50.0, 500.0)
LARGER = (
    Cell(64, (10, 150), 500.0, 128, 4),
    Cell(64, (10, 150), 200.0, 256, 8),
    Cell(64, (10, 150), 500.0, 256, 8),
)
"""What larger models make of it."""
CELLS = (*(Cell(rows, tokens, ms) for tokens, rows, ms in product(TURN_TOKENS, ROWS, SEARCH_MS)), *LARGER)
COMPARED = ("trl_loop", "lockstep", "slots_event")
MEASURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("Seconds of processor time", "cpu_seconds", lambda value: f"{value:.1f}"),
    ("Seconds", "wall_seconds", lambda value: f"{value:.1f}"),
    ("Tokens prefilled over needed", "prefilled_over_needed", lambda value: f"{value:.2f}"),
)
INTRODUCTION = """`python -m benchmarks.rollout` ([what it does](../rollout/__main__.py)), a cell after the other, each
on one thread; {cpus} processors, torch {torch}, transformers {transformers}, TRL {trl}. Model: hidden size × layers.
Search: its mean, log-normal with sigma 0.75 for each query."""


REJOIN = [
    replace(cell, rejoin_after=steps)
    for cell in CELLS
    if (cell.rows, cell.turn_tokens) == (64, TURN_TOKENS[0])
    for steps in (0, 4, 16, 32, 64)
]
"""What `rejoin_after` does to `slots_event`."""


def key(cell: Cell) -> dict[str, Any]:
    """What rows of a cell have in common."""
    return {**asdict(cell), "turn_tokens": "{}-{}".format(*cell.turn_tokens)}


def run(result: dict[str, Any]) -> None:
    """Measure what `result` has not got, and write it after each cell."""
    for cell, engine in (*product(CELLS, ENGINES), *((cell, "slots_event") for cell in REJOIN)):
        wanted = {"engine": engine, **key(cell)}
        if not any(wanted.items() <= row.items() for row in result["rows"]):
            print(wanted, flush=True)
            result["rows"].append(wanted | alone({}, measure, engine, cell))
            write(result)


def write(result: dict[str, Any]) -> None:
    FILE.write_text(json.dumps(result, indent=2) + "\n")
    FILE.with_suffix(".md").write_text(report(result))


def report(result: dict[str, Any]) -> str:
    blocks = ["# What a rollout costs", INTRODUCTION.format(**result["environment"])]
    names = ["turns, tokens", "rows", "search", "model", *(f"`{engine}`" for engine in COMPARED)]
    for title, name, shown in MEASURES:
        lines = []
        for cell in CELLS:
            found = rows_of(result, cell)
            cells = [shown(found[engine][name]) if engine in found else "" for engine in COMPARED]
            low, high = cell.turn_tokens
            lines += [[f"{low}-{high}", str(cell.rows), *where(cell), *cells]] if found else []
        blocks += [f"## {title}", table(names, lines)]
    blocks += ["## API calls", called(result)]
    names = ["search", "model", "`rejoin_after`", "processor time, s", "time, s", "waiting, s"]
    figures = ("cpu_seconds", "wall_seconds", "waiting_seconds")
    lines = [
        [*where(cell), str(cell.rejoin_after), *(f"{row[name]:.1f}" for name in figures)]
        for cell in REJOIN
        if (row := rows_of(result, cell).get("slots_event"))
    ]
    blocks += ["## What `rejoin_after` does to `slots_event`", table(names, lines)]
    return "\n\n".join(block.strip() for block in blocks) + "\n"


def called(result: dict[str, Any]) -> str:
    """What API calls cost beside the engine alone."""
    names = ["turns, tokens", "rows", "search", "model", "processor time, s: alone", "with calls"]
    names += ["time, s: alone", "with calls", "ratio", "endpoint, ms per call"]
    lines = []
    for cell in CELLS:
        found = rows_of(result, cell)
        if {"engine_alone", "endpoint"} <= found.keys():
            alone, calls = found["engine_alone"], found["endpoint"]
            seconds = [each[name] for name in ("cpu_seconds", "wall_seconds") for each in (alone, calls)]
            low, high = cell.turn_tokens
            ratio, per_call = calls["wall_seconds"] / alone["wall_seconds"], calls["endpoint_ms_per_call"]
            figures = [*(f"{each:.1f}" for each in seconds), f"{ratio:.2f}", f"{per_call:.1f}"]
            lines.append([f"{low}-{high}", str(cell.rows), *where(cell), *figures])
    return table(names, lines)


def rows_of(result: dict[str, Any], cell: Cell) -> dict[str, dict[str, Any]]:
    """By engine."""
    return {row["engine"]: row for row in result["rows"] if key(cell).items() <= row.items()}


def where(cell: Cell) -> list[str]:
    return [f"{cell.search_ms:g} ms", f"{cell.hidden_size} × {cell.layers}"]


def main(words: Sequence[str]) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--go-on", action="store_true", help="keep what the file of an earlier run holds")
    result = {"rows": [], "environment": {name: version(name) for name in ("torch", "transformers", "trl")}}
    result["environment"] |= {"cpus": os.cpu_count()}
    if parser.parse_args(words).go_on and FILE.is_file():
        result = json.loads(FILE.read_text()) | {"environment": result["environment"]}
    run(result)
    write(result)
    print(FILE.with_suffix(".md").read_text())


if __name__ == "__main__":
    sys.exit(run_command(main))
