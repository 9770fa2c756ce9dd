"""How much of what the stability benchmark trained on was outside the clip range, in tokens, turns and sequences.

    python -m benchmarks.clip_shares

Reads the archived runs of the judging seeds at the common learning rate, and prints the table of
docs/paper_to_code.md. Trains nothing.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence

from benchmarks import stability
from benchmarks.stability_grid import JUDGING_SEEDS, REGIMES
from benchmarks.worlds import QuestionWorld
from sorl_trl.command_line import Parser, run_command

COLUMNS = {
    "tokens stopped, GRPO": ("grpo", "clip_ratio/region_mean"),
    "sequences stopped, GSPO": ("gspo", "clip_ratio/region_mean"),
    "tokens outside, turn ratios": ("turn_geometric", "clip_fraction/token"),
    "turns outside, turn ratios": ("turn_geometric", "clip_fraction/turn"),
}
"""Column to method and metric."""


def share(regime: str, method: str, metric: str) -> float:
    """The mean over rollouts and runs."""
    runs = (
        record
        for record in stability.read_archive(stability.ARCHIVE)
        if (record["regime"], record["method"]) == (regime, method)
        and record["learning_rate"] == REGIMES[regime].learning_rate
        and record["seed"] in JUDGING_SEEDS
    )
    return statistics.fmean(
        rollout[metric] for run in runs for rollout in run["rollouts"] if rollout.get(metric) is not None
    )


def main(words: Sequence[str] | None = None) -> None:
    Parser(description=__doc__).parse_args(words)
    print("| regime | " + " | ".join(COLUMNS) + " |")
    print("|---" * (1 + len(COLUMNS)) + "|")
    for regime in (name for name, each in REGIMES.items() if isinstance(each.world, QuestionWorld)):
        shares = (f"{share(regime, *column):.1%}" for column in COLUMNS.values())
        print(f"| {regime} | " + " | ".join(shares) + " |")


if __name__ == "__main__":
    sys.exit(run_command(main))
