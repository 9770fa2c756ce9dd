"""What a rollout costs: TRL's loop over tools, lock-step, and engines that keep what they have read, on one workload.

    python -m benchmarks.rollout                                  # the grid: hours on two cores
    python -m benchmarks.rollout --go-on                          # what is not in the files yet

- `trl_loop`: `trl.GRPOTrainer` with a tool. All rows generate with `model.generate` from their whole context, in every
  turn, and when all have ended their turn, they search one after the other.
- `lockstep`: our collector with any `Generator`, here `HFGenerator`. Rows generate likewise, and search in one batch.
- `slots_event`: our collector with `SlotEngine`. Only what is new goes through the model. No row waits for another:
  each searches when it has ended its turn, and what is found rejoins after `rejoin_after` polls.

`benchmarks.rollout.script` says how turns, observations and searches are drawn: the same ones for all engines. Each
cell runs in a process of its own on one thread. Of the rollout alone it measures

- `cpu_seconds` and `wall_seconds`;
- `prefilled_over_needed`: tokens of contexts that went through the model, over those that must if each token of a
  trajectory is computed once (prompt, observations, and the last token of every turn that one follows);
- `waiting_seconds`: in which something was being searched for and nothing generated.

Writes `benchmarks/results/rollout.json` and `rollout.md`, after each cell anew. The table leaves out rows of other
engines and of 16 trajectories, which are of an earlier version.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from importlib.metadata import version
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.rollout.engines import ENGINES, measure
from benchmarks.rollout.script import Cell
from benchmarks.rollout.table import format_result
from sorl_trl.command_line import Parser, run_command

FILE = Path(__file__).parents[1] / "results/rollout.json"
ROWS = (64, 128)
TURN_TOKENS = ((10, 150), (100, 500))
SEARCH_MS = (0.0, 50.0, 500.0)
REJOIN = (0, 4, 16, 32, 64)
"""Tried with `slots_event` in the cells of 64 rows and the shorter turns."""
LARGER = (
    Cell(64, (10, 150), 500.0, 128, 4),
    Cell(64, (10, 150), 200.0, 256, 8),
    Cell(64, (10, 150), 500.0, 256, 8),
)
"""What larger models make of it."""
CELLS = (*(Cell(rows, tokens, ms) for tokens, rows, ms in product(TURN_TOKENS, ROWS, SEARCH_MS)), *LARGER)


def run(result: dict[str, Any]) -> None:
    """Measure what `result` has not got, and write it after each cell."""
    for cell, engine in product(CELLS, ENGINES):
        if is_measured(result["rows"], engine, cell):
            continue
        print(f"{engine:>15} {asdict(cell)}", flush=True)
        result["rows"].append(in_a_process(engine, cell))
        write(result)
    tried = [cell for cell in CELLS if (cell.rows, cell.turn_tokens) == (64, TURN_TOKENS[0])]
    for cell, rejoin_after in product(tried, REJOIN):
        others = [row for row in result["rejoin_after"] if row["rejoin_after"] == rejoin_after]
        if not is_measured(others, "slots_event", cell):
            print(f"rejoin_after={rejoin_after} {asdict(cell)}", flush=True)
            result["rejoin_after"].append(in_a_process("slots_event", cell, rejoin_after))
            write(result)


def is_measured(rows: Sequence[dict[str, Any]], engine: str, cell: Cell) -> bool:
    low, high = cell.turn_tokens
    wanted = {"engine": engine, **asdict(cell), "turn_tokens": f"{low}-{high}"}
    return any(wanted.items() <= row.items() for row in rows)


def in_a_process(engine: str, cell: Cell, *options: Any) -> dict[str, Any]:
    """Measured where nothing has run before."""
    with ProcessPoolExecutor(1, get_context("spawn"), logging.disable, (logging.WARNING,)) as pool:
        return pool.submit(measure, engine, cell, *options).result()


def write(result: dict[str, Any]) -> None:
    FILE.write_text(json.dumps(result, indent=2) + "\n")
    FILE.with_suffix(".md").write_text(format_result(result | {"rows": compared(result["rows"])}))


def compared(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if any(is_measured([row], *case) for case in product(ENGINES, CELLS))]


def empty_result() -> dict[str, Any]:
    return {
        "rows": [],
        "rejoin_after": [],
        "environment": {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
            **{name: version(name) for name in ("torch", "transformers", "trl")},
        },
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--go-on", action="store_true", help="keep what the files of an earlier run hold")
    arguments = parser.parse_args(words)
    result = empty_result()
    if arguments.go_on and FILE.is_file():
        result = json.loads(FILE.read_text()) | {"environment": result["environment"]}
    run(result)
    write(result)
    print(FILE.with_suffix(".md").read_text())


if __name__ == "__main__":
    sys.exit(run_command(main))
