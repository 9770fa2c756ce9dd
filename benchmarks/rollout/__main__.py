"""What a rollout costs: TRL's loop over tools, lock-step, and engines that keep what they have read, on one workload.

    python -m benchmarks.rollout                                  # the grid: hours on two cores
    python -m benchmarks.rollout --go-on                          # what is not in the files yet

- `trl_loop`: `trl.GRPOTrainer` with a tool. All rows generate with `model.generate` from their whole context, in every
  turn, and when all have ended their turn, they search one after the other.
- `lockstep`: our collector with any `Generator`, here `HFGenerator`. Rows generate likewise, and search in one batch.
- `slots_lockstep`: the same, but with `SlotEngine`: only what is new goes through the model, and rows that have ended
  take part in no step.
- `slots_event`: the same engine as it is meant to be used. No row waits for another: each searches when it has ended
  its turn, and what is found rejoins after `rejoin_after` polls.

`benchmarks.rollout.script` says how turns, observations and searches are drawn: the same ones for all engines. Each
cell runs in a process of its own on one thread. Of the rollout alone it measures

- `cpu_seconds` and `wall_seconds`;
- `prefilled_over_needed`: tokens of contexts that went through the model, over those that must if each token of a
  trajectory is computed once (prompt, observations, and the last token of every turn that one follows);
- `row_steps_over_needed`: decode steps, counted by row, over those that sampled a token that is kept;
- `waiting_seconds`: in which something was being searched for and nothing generated;
- `peak_memory_mb`: by how much the process grew at its peak.

Writes `benchmarks/results/rollout.json` and `rollout.md`, after each cell anew. Rows of `vllm_colocate`, vLLM in the
same process, are of an earlier version.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.rollout.engines import ENGINES, measure
from benchmarks.rollout.script import Cell
from benchmarks.rollout.table import format_result
from sorl_trl.command_line import Parser, UserMistake, at_least, run_command

RESULTS = Path(__file__).parents[1] / "results"
ROWS = (16, 64, 128)
TURN_TOKENS = ("10-150", "100-500")
SEARCH_MS = (0.0, 50.0, 500.0)
REJOIN = (0, 4, 16, 32, 64)
LARGER = (
    Cell(64, (10, 150), 500.0, 128, 4),
    Cell(64, (10, 150), 200.0, 256, 8),
    Cell(64, (10, 150), 500.0, 256, 8),
)
"""What larger models make of it."""


@dataclass(frozen=True)
class Plan:
    """What is to be measured."""

    cells: tuple[Cell, ...]
    engines: tuple[str, ...]
    rejoin_after: tuple[int, ...]
    """Tried with `slots_event` in the cells of 64 rows and the shortest turns."""
    output: Path


def grid(rows: Sequence[int], turn_tokens: Sequence[str], search_ms: Sequence[float]) -> Iterator[Cell]:
    for tokens, count, milliseconds in product(turn_tokens, rows, search_ms):
        yield Cell(count, span(tokens), milliseconds)


def span(text: str) -> tuple[int, int]:
    """The two numbers of "10-150". Raises UserMistake for anything else."""
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal() and 2 <= int(low) <= int(high)):
        raise UserMistake(f"--turn-tokens {text}: write the shortest (at least 2) and the longest, such as 10-150")
    return int(low), int(high)


def run(plan: Plan, result: dict[str, Any]) -> None:
    """Measure what `result` has not got, and write it after each cell."""
    for cell, engine in product(plan.cells, plan.engines):
        if is_measured(result["rows"], engine, cell):
            continue
        print(f"{engine:>15} {asdict(cell)}", flush=True)
        result["rows"].append(in_a_process(engine, cell))
        write(result, plan.output)
    tried = [cell for cell in plan.cells if (cell.rows, cell.turn_tokens) == (64, span(TURN_TOKENS[0]))]
    for cell, rejoin_after in product(tried, plan.rejoin_after):
        others = [row for row in result["rejoin_after"] if row["rejoin_after"] == rejoin_after]
        if not is_measured(others, "slots_event", cell):
            print(f"rejoin_after={rejoin_after} {asdict(cell)}", flush=True)
            result["rejoin_after"].append(in_a_process("slots_event", cell, rejoin_after))
            write(result, plan.output)


def is_measured(rows: Sequence[dict[str, Any]], engine: str, cell: Cell) -> bool:
    low, high = cell.turn_tokens
    wanted = {"engine": engine, **asdict(cell), "turn_tokens": f"{low}-{high}"}
    return any(wanted.items() <= row.items() for row in rows)


def in_a_process(engine: str, cell: Cell, *options: Any) -> dict[str, Any]:
    """Measured where nothing has run before, for the sake of its memory."""
    with ProcessPoolExecutor(1, get_context("spawn"), logging.disable, (logging.WARNING,)) as pool:
        return pool.submit(measure, engine, cell, *options).result()


def write(result: dict[str, Any], output: Path) -> None:
    output.mkdir(parents=True, exist_ok=True)
    (output / "rollout.json").write_text(json.dumps(result, indent=2) + "\n")
    (output / "rollout.md").write_text(format_result(result))


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


def parse_arguments(words: Sequence[str] | None) -> Any:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=at_least(2), nargs="+", default=ROWS, help="default: %(default)s")
    parser.add_argument("--turn-tokens", nargs="+", default=TURN_TOKENS, help="default: %(default)s")
    parser.add_argument("--search-ms", type=float, nargs="+", default=SEARCH_MS, help="default: %(default)s")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=tuple(ENGINES), help="default: all")
    parser.add_argument("--rejoin-after", type=at_least(0), nargs="*", default=REJOIN, help="default: %(default)s")
    parser.add_argument("--grid-alone", action="store_true", help="leave out the cells with larger models")
    parser.add_argument("--go-on", action="store_true", help="keep what the files of an earlier run hold")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the two files (default: %(default)s)")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(words)
    result = empty_result()
    if arguments.go_on and (earlier := arguments.output / "rollout.json").is_file():
        result |= {key: json.loads(earlier.read_text())[key] for key in ("rows", "rejoin_after")}
    cells = tuple(grid(arguments.rows, arguments.turn_tokens, arguments.search_ms))
    cells += () if arguments.grid_alone else LARGER
    run(Plan(cells, tuple(arguments.engines), tuple(arguments.rejoin_after), arguments.output), result)
    write(result, arguments.output)
    print(format_result(result))


if __name__ == "__main__":
    sys.exit(run_command(main))
