"""Does the turn beat the token and the sequence as turns grow longer?

    python -m benchmarks.turn_length            # everything: hours, and it goes on where it was interrupted
    python -m benchmarks.turn_length --report   # only writes the report again

Runs `LENGTH_REGIMES` of `stability_plan.py` with the judging seeds, as `benchmarks.stability` runs its own: the same
questions with the same decisions, written in turns of 4 to 80 tokens. In each, three ratios, which differ in what
belongs to their level, the clip range among it: alone, and with a target KL. In the longest turns, the methods of
other sources too. Writes `benchmarks/results/turn_length.json` and `.md`, in which the rows of new runs replace those
of earlier ones.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from benchmarks.common import RESULTS, Row, read_rows, table, write_rows
from benchmarks.stability import load, run_all
from benchmarks.stability_plan import COMPARED, JUDGING_SEEDS, LENGTH_REGIMES, METHODS
from benchmarks.stability_report import Record, Run, paired, summarize
from benchmarks.stability_run import Job
from benchmarks.worlds.working import SEEDS_PER_POLICY
from sorl_trl.command_line import Parser, at_least, run_command

CONTRASTS = {"turn-token": "token", "turn-sequence": "sequence"}
"""Name of a contrast to the level whose final EM is taken from that of turns."""
SHAPE = {"turn_tokens": "rollout/tokens_per_turn", "turns": "rollout/turns_per_trajectory"}
HEADER = """# Does the turn beat the token and the sequence as turns grow longer?

Written by `python -m benchmarks.turn_length`: the same questions, passages and decisions, written in turns of other
lengths; five rollouts of 16 updates, at one learning rate. A difference is the final sampled EM with turn ratios less
that with the other ratios, paired by seed, with a 95 % percentile bootstrap interval over seeds; p is that of the
exact sign-flip test, for no more than one comparison. Four seeds in turn start from one policy each and differ in
questions and random numbers: neither interval nor p, which take seeds for independent, says how other policies would
do.
The clip range is 0.2 either way for tokens, divided by the square root of its tokens for a turn and by their number
for a sequence, as chosen on other seeds. Tokens and turns are those of the first rollout, before training has changed
them. The rows of GiGPO and "sequence, GiGPO's turns" were made when turns were compared with one mean per group."""
ENDS = """Means over the seeds: sampled EM of the policy that the runs start from, final EM, and how many of them end
below their start or below half of their best."""


def place_of(seed: int) -> tuple[int, int]:
    """One seed of each policy, then another of each."""
    return (seed - 1) % SEEDS_PER_POLICY, seed


def jobs() -> Iterator[Job]:
    """Seed by seed, so that what has run can be compared at any time."""
    for seed in sorted(JUDGING_SEEDS, key=place_of):
        for name, regime in LENGTH_REGIMES.items():
            for method in regime.methods:
                yield Job(name, method, regime.learning_rate, seed)


def make_rows(records: Iterable[Record], earlier: Sequence[Row]) -> list[Row]:
    """A row per regime and method, as those of `stability.json`, with `start` and the shape of the first rollout."""
    made = {(row["regime"], row["method"]): row for row in earlier}
    runs = sorted(map(Run, records), key=lambda run: (run.cell, place_of(run.seed)))
    for cell, of_cell in groupby(runs, key=lambda run: run.cell):
        row = _row(cell, [*of_cell])
        if {*made.get(cell[:2], row)["seeds"]} <= {*row["seeds"]}:
            made[cell[:2]] = row
    order = [(name, method) for name, regime in LENGTH_REGIMES.items() for method in regime.methods]
    return [made[place] for place in order if place in made]


def _row(cell: tuple[str, str, float], runs: Sequence[Run]) -> Row:
    regime, method, rate = cell
    firsts = {name: [figures[0] for run in runs if (figures := run.metric(key))] for name, key in SHAPE.items()}
    shape = {name: statistics.fmean(found) if found else None for name, found in firsts.items()}
    start = statistics.fmean(run.start for run in runs)
    return {"regime": regime, "method": method, "learning_rate": rate, **shape, "start": start, **summarize(runs)}


def contrasts(rows: Sequence[Row]) -> list[Row]:
    """Turns less tokens and less sequences, in every regime and setting of which some seed has both runs."""
    by_cell = {(row["regime"], row["method"]): row for row in rows}
    found = []
    for regime in LENGTH_REGIMES:
        for setting, methods in COMPARED.items():
            turn = by_cell.get((regime, methods["turn"]))
            for name, level in CONTRASTS.items():
                other = by_cell.get((regime, methods[level]))
                pair = paired(turn, other) if turn else None
                if turn and other and pair:
                    shape = {key: _mean([turn[key], other[key]]) for key in SHAPE}
                    found.append({"regime": regime, "setting": setting, "contrast": name, **shape, **pair})
    return found


def _mean(figures: Sequence[float | None]) -> float | None:
    kept = [figure for figure in figures if figure is not None]
    return statistics.fmean(kept) if kept else None


def difference(row: Row) -> str:
    interval = "" if row["interval"] is None else " [{:+.3f}, {:+.3f}]".format(*row["interval"])
    return f"{row['mean']:+.3f}{interval}"


def report(rows: Sequence[Row]) -> str:
    """`turn_length.md`."""
    compared = [
        [
            *(row["setting"], row["contrast"], *("–" if row[key] is None else f"{row[key]:.1f}" for key in SHAPE)),
            *(difference(row), f"{row['p']:.3g}", str(len(row["seeds"]))),
        ]
        for row in contrasts(rows)
    ]
    ends = [
        [
            *(LENGTH_REGIMES[row["regime"]].title, METHODS[row["method"]].title, f"{row['start']:.3f}"),
            *(f"{row['sampled_em']:.3f}", f"{row['greedy_em']:.3f}", f"{row['collapses']} of {len(row['seeds'])}"),
        ]
        for row in rows
    ]
    names = ["setting", "contrast", "tokens a turn", "turns", "difference", "p", "seeds"]
    blocks = [HEADER, table(names, compared, 2), "## Where they end", ENDS]
    blocks += [table(["world", "method", "start", "sampled EM", "greedy EM", "collapsed"], ends, 2)]
    return "\n\n".join(block.strip() for block in blocks) + "\n"


def main(words: Sequence[str]) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--workers", type=at_least(1), default=os.cpu_count() or 1, help="runs at a time")
    arguments = parser.parse_args(words)
    if not arguments.report:
        run_all(jobs(), arguments.workers, "Turns of several lengths")
    planned = {*jobs()}
    records = [record for job, record in load().items() if job in planned]
    rows = make_rows(records, read_rows(RESULTS / "turn_length.json"))
    write_rows(rows, RESULTS / "turn_length.json")
    (RESULTS / "turn_length.md").write_text(report(rows))
    print(f"The report is in {RESULTS / 'turn_length.md'}.")


if __name__ == "__main__":
    sys.exit(run_command(main))
