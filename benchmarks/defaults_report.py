"""What the defaults rest on: rows of the stability benchmark against each other, and harness against harness.

    python -m benchmarks.defaults_report

Runs nothing. Differences are of the final EM at each regime's common learning rate, over the judging seeds that both
rows have with the same harness: with one harness the error of an evaluation is common to both rows, with two it is
not. How far apart two harnesses read is seen in `harness_runs.jsonl.xz`, runs of the first harness that have since
been made again with a later one. Writes `benchmarks/results/defaults.md`.
"""

from __future__ import annotations

import math
import statistics
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterable, Iterator, Sequence

from benchmarks.guard_report import table
from benchmarks.seed_statistics import MOST_PAIRS, sign_flip_test
from benchmarks.stability import RESULTS, load, read_archive
from benchmarks.stability_statistics import Grid, Run, published_grid, read_runs
from sorl_trl.command_line import Parser, run_command

REPLACED = RESULTS / "harness_runs.jsonl.xz"
PAGE = RESULTS / "defaults.md"
CONTRASTS = (
    ("so_grpo", "so_grpo_first"),
    ("so_grpo", "grpo_target"),
    ("so_grpo", "gspo_length_target"),
    ("so_grpo_penalty", "so_grpo"),
    ("so_middle", "turn_middle"),
    ("so_middle", "so_grpo_first"),
    ("turn_middle", "so_grpo"),
    ("so_ppo", "so_ppo_first"),
    ("so_ppo", "ppo_target"),
)
"""One row minus the other, by name."""
SCORES = {"sampled_em": "Sampled answers", "greedy_em": "Greedy answers"}

By = dict[tuple[str, str, int], Run]
"""Regime, method and seed to a judging run at the common learning rate."""


def judging_runs(runs: Iterable[Run], grid: Grid) -> By:
    """Those at the common learning rate of their regime."""
    of_interest = (run for run in runs if run.seed in grid.judging_seeds)
    return {(*run.cell[:2], run.seed): run for run in of_interest if run.cell[2] == grid.common(run.cell[0])}


def differences(runs: By, regime: str, contrast: tuple[str, str], score: str) -> list[float]:
    """(seeds,) the first method's final EM minus the second's, where one harness evaluated both."""
    method, other = contrast
    pairs = (
        (run, runs[regime, other, seed])
        for (of_regime, of_method, seed), run in runs.items()
        if (of_regime, of_method) == (regime, method) and (regime, other, seed) in runs
    )
    return [first.final(score) - second.final(score) for first, second in pairs if first.harness == second.harness]


def standard_error(values: Sequence[float]) -> float:
    """Of their mean; infinite for fewer than two."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def contrast_rows(runs: By, grid: Grid, score: str) -> tuple[list[str], list[list[str]]]:
    """The header and a row per contrast that has a pair: each regime's, and that of all pairs together."""
    found = {
        contrast: {regime: differences(runs, regime, contrast, score) for regime in grid.regimes}
        for contrast in CONTRASTS
        if {*contrast} <= {*grid.methods}
    }
    regimes = [regime for regime in grid.regimes if any(by_regime[regime] for by_regime in found.values())]
    rows = []
    for (method, other), by_regime in found.items():
        values = [value for regime in regimes for value in by_regime[regime]]
        if values:
            title = f"{grid.methods[method].title} − {grid.methods[other].title}"
            rows.append([title, *(_cell(by_regime[regime]) for regime in regimes), _cell(values)])
    return ["", *(grid.regimes[regime].title for regime in regimes), "all pairs"], rows


def _cell(values: Sequence[float]) -> str:
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):+.3f}"
    if len(values) == 1:
        return f"{mean} (1)"
    p = f", p {sign_flip_test(values):.2g}" if len(values) <= MOST_PAIRS else ""
    return f"{mean} ± {standard_error(values):.3f} ({len(values)}{p})"


def harness_lines(replaced: Iterable[Run], runs: By) -> Iterator[str]:
    """By how much the runs of a later harness end above those of the first."""
    by_harness: dict[int, list[float]] = {}
    for old in replaced:
        if new := runs.get((*old.cell[:2], old.seed)):
            by_harness.setdefault(new.harness, []).append(new.final("sampled_em") - old.final("sampled_em"))
    for harness, values in sorted(by_harness.items()):
        yield (
            f"- {len(values)} runs that harness 1 evaluated, made again with harness {harness}: "
            f"{statistics.fmean(values):+.3f} ± {standard_error(values):.3f}."
        )


def page(replaced: Sequence[Run], runs: By, grid: Grid) -> str:
    lines = ["# What the defaults rest on", "", (__doc__ or "").strip(), ""]
    lines += ["Each cell: mean ± standard error (pairs, p of the exact two-sided sign-flip test).", ""]
    for score, title in SCORES.items():
        lines += [f"## {title}", "", *table(*contrast_rows(runs, grid, score))]
    return "\n".join([*lines, "## Harnesses", "", *harness_lines(replaced, runs), ""])


def main(words: Sequence[str] | None = None) -> None:
    Parser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args(words)
    grid = published_grid()
    runs = judging_runs(read_runs(load(), grid), grid)
    PAGE.write_text(page([*map(Run, read_archive(REPLACED))], runs, grid))
    print(PAGE.read_text())


if __name__ == "__main__":
    sys.exit(run_command(main))
