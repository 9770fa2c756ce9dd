"""What the defaults rest on: rows of the stability benchmark against each other, and harness against harness.

    python -m benchmarks.defaults_report

Runs nothing, and reads the archives alone. Differences are of the final EM at each regime's common learning rate,
over the judging seeds that both rows have with the same harness: with one harness the error of an evaluation is common
to both rows, with two it is not. Reuse and stale of a seed have the same world and start from the same policy: in the
last column each world of a seed counts once, with the mean of its differences. How far apart two harnesses read is
seen in `harness_runs.jsonl.xz`, runs that have since been made again with a later one; whoever makes runs again adds
those that they replace. Writes `benchmarks/results/defaults.md`.
"""

from __future__ import annotations

import math
import statistics
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterable, Sequence

from benchmarks.guard_report import table
from benchmarks.seed_statistics import MOST_PAIRS, sign_flip_test
from benchmarks.stability import ARCHIVE, RESULTS, is_current, read_archive
from benchmarks.stability_statistics import Grid, Run, published_grid, read_runs
from sorl_trl.command_line import Parser, run_command

REPLACED = RESULTS / "harness_runs.jsonl.xz"
PAGE = RESULTS / "defaults.md"
CONTRASTS = (
    ("so_grpo", "so_grpo_turn"),
    ("so_grpo", "so_grpo_first"),
    ("so_grpo", "grpo_target"),
    ("so_grpo_turn", "grpo_target"),
    ("so_grpo_turn", "so_grpo_first"),
    ("turn_of_tokens", "so_grpo_turn"),
    ("so_grpo_penalty", "so_grpo_turn"),
    ("so_middle", "turn_middle"),
    ("so_middle", "so_grpo_first"),
    ("turn_middle", "so_grpo_turn"),
    ("so_ppo", "so_ppo_turn"),
    ("so_ppo_turn", "so_ppo_first"),
    ("so_ppo", "ppo_target"),
)
"""One row minus the other, by name."""
SCORES = {"sampled_em": "Sampled answers", "greedy_em": "Greedy answers"}
CELLS = """Each cell: mean ± standard error (seeds, p of the exact two-sided sign-flip test); p is for one comparison,
and here are many. "–": both rows have no judging run of one harness there."""

ByCluster = dict[tuple[str, int], list[float]]
"""World and seed to the differences between runs of it."""


def judging_runs(runs: Iterable[Run], grid: Grid) -> list[Run]:
    """Those at the common learning rate of their regime."""
    return [run for run in runs if run.seed in grid.judging_seeds and run.cell[2] == grid.common(run.cell[0])]


def differences(runs: Sequence[Run], contrast: tuple[str, str], regime: str, score: str) -> ByCluster:
    """The first method's final EM minus the second's, of runs that one harness evaluated."""
    of_method = {
        name: {(run.harness, run.seed): run for run in runs if run.cell[:2] == (regime, name)} for name in contrast
    }
    first, second = (of_method[name] for name in contrast)
    return {
        (run.record["world"], run.seed): [run.final(score) - second[pair].final(score)]
        for pair, run in first.items()
        if pair in second
    }


def merged(parts: Iterable[ByCluster]) -> ByCluster:
    found: ByCluster = {}
    for part in parts:
        for cluster, values in part.items():
            found.setdefault(cluster, []).extend(values)
    return found


def cell(clusters: ByCluster) -> str:
    """Mean over clusters, its standard error, their number and p."""
    values = [statistics.fmean(each) for each in clusters.values()]
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):+.3f}"
    if len(values) == 1:
        return f"{mean} (1)"
    p = f", p {sign_flip_test(values):.2g}" if len(values) <= MOST_PAIRS else ""
    return f"{mean} ± {statistics.stdev(values) / math.sqrt(len(values)):.3f} ({len(values)}{p})"


def contrast_rows(runs: Sequence[Run], grid: Grid, score: str) -> tuple[list[str], list[list[str]]]:
    """The header and a row per contrast: each regime that has a pair of any, and all of them together."""
    contrasts = [contrast for contrast in CONTRASTS if {*contrast} <= {*grid.methods}]
    found = {(c, regime): differences(runs, c, regime, score) for c in contrasts for regime in grid.regimes}
    regimes = [regime for regime in grid.regimes if any(found[contrast, regime] for contrast in contrasts)]
    rows = [
        [
            " − ".join(grid.methods[name].title for name in contrast),
            *(cell(found[contrast, regime]) for regime in regimes),
            cell(merged(found[contrast, regime] for regime in regimes)),
        ]
        for contrast in contrasts
    ]
    return ["", *(grid.regimes[regime].title for regime in regimes), "all, by world and seed"], rows


def harness_rows(replaced: Iterable[Run], runs: Iterable[Run]) -> list[list[str]]:
    """How far above the runs of an earlier harness those end that were made again: by harnesses and world."""
    now = {(*run.cell, run.seed): run for run in runs}
    parts: dict[tuple[str, str], list[ByCluster]] = {}
    for old in replaced:
        new = now.get((*old.cell, old.seed))
        if new and new.record["settings"] == old.record["settings"]:
            world = old.record["world"]
            difference = {(world, old.seed): [new.final("sampled_em") - old.final("sampled_em")]}
            for part in (f"`{world}`", "all"):
                parts.setdefault((f"{new.harness} − {old.harness}", part), []).append(difference)
    return [[*part, str(len(found)), cell(merged(found))] for part, found in sorted(parts.items(), reverse=True)]


def page() -> str:
    """The text of `PAGE`, from the archives."""
    grid = published_grid()
    archived = read_runs([record for record in read_archive(ARCHIVE) if is_current(record)], grid)
    runs, replaced = judging_runs(archived, grid), [*map(Run, read_archive(REPLACED))]
    lines = ["# What the defaults rest on", "", (__doc__ or "").strip(), "", CELLS, ""]
    for score, title in SCORES.items():
        lines += [f"## {title}", "", *table(*contrast_rows(runs, grid, score))]
    lines += ["## Harnesses", "", "Runs made again, by world and seed:", ""]
    return "\n".join([*lines, *table(["harnesses", "world", "runs", "sampled EM"], harness_rows(replaced, runs))])


def main(words: Sequence[str] | None = None) -> None:
    Parser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args(words)
    PAGE.write_text(page())
    print(PAGE.read_text())


if __name__ == "__main__":
    sys.exit(run_command(main))
