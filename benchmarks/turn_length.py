"""Does the turn beat the token and the sequence as turns grow longer?

    python -m benchmarks.turn_length            # everything: hours, and it goes on where it was interrupted
    python -m benchmarks.turn_length --report   # only writes the report again

Runs the plan of `turn_length_grid.py` with the judging seeds, as `benchmarks.stability` runs its own. They are kept
in `benchmarks/results/turn_length_runs.jsonl.xz`. Writes `benchmarks/results/turn_length.json`, `.md` and `.png`.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.stability import RESULTS, is_made_as, key, read_all, run_missing, save
from benchmarks.stability_grid import JUDGING_SEEDS
from benchmarks.stability_run import Job
from benchmarks.turn_length_grid import HOPS, LENGTH_REGIMES, SEEDS_PER_POLICY, SETTINGS, SHAPES, VERBOSITY
from benchmarks.turn_length_report import length_rows, write_turn_length
from sorl_trl.command_line import Parser, at_least, run_command

ARCHIVE = RESULTS / "turn_length_runs.jsonl.xz"
PANELS = {
    "turn_tokens": {name for name, shape in zip(LENGTH_REGIMES, SHAPES, strict=True) if shape[1] == HOPS},
    "turns": {name for name, shape in zip(LENGTH_REGIMES, SHAPES, strict=True) if shape[0] == VERBOSITY},
}


def jobs() -> Iterator[Job]:
    """Seed by seed, so that what has run can be compared at any time; one of each policy, then another of each."""
    for seed in sorted(JUDGING_SEEDS, key=lambda seed: (seed - 1) % SEEDS_PER_POLICY):
        for name, regime in LENGTH_REGIMES.items():
            for method in regime.methods:
                yield Job(name, method, regime.learning_rate, seed)


def load() -> list[dict[str, Any]]:
    """The runs of the plan that there are, in its order; those with other settings are left out."""
    found = {key(record): record for record in read_all(ARCHIVE)}
    return [found[job] for job in jobs() if job in found and is_made_as(found[job], job)]


def parse_arguments(words: Sequence[str]) -> Namespace:
    parser = Parser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--workers", type=at_least(1), default=os.cpu_count() or 1, help="runs at a time")
    arguments: Namespace = parser.parse_args(words)
    return arguments


def main(words: Sequence[str]) -> None:
    arguments = parse_arguments(words)
    if not arguments.report:
        run_missing(jobs(), set(map(key, load())), arguments.workers, "Turns of several lengths")
    records = load()
    save(records, ARCHIVE)
    write_turn_length(records, length_rows(records, SETTINGS), RESULTS, PANELS)
    print(f"The report is in {RESULTS / 'turn_length.md'}.")


if __name__ == "__main__":
    sys.exit(run_command(main))
