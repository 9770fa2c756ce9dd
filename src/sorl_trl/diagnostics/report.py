"""Reports on training runs: `python -m sorl_trl.diagnostics.report run/ [other_run/ …] --output report/`.

Writes `report.png`, the curves of all runs, and `report.html`, one file with these curves, a table of figures, what
stands out in each run, its configuration, and where the time of its last rollout went (`rollouts.png`, too). Reads
`trainer_state.json` and other JSON files, at any time of a run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from sorl_trl.command_line import Parser, mistakes, run_command
from sorl_trl.diagnostics.collapse_detector import detect
from sorl_trl.diagnostics.plots import PANELS, draw_runs
from sorl_trl.diagnostics.report_page import Figure, Page, Row, render_page
from sorl_trl.diagnostics.rollout_picture import draw_rollouts
from sorl_trl.diagnostics.run_groups import differing_settings, group_runs, places
from sorl_trl.diagnostics.runs import SMOOTHED_FROM, LogHistory, Run, Series, load_runs
from sorl_trl.files import write_whole

FALLEN = 0.8
"""A reward or a number of searches below this share of its best average is mentioned."""
RISEN = 3.0
"""A KL or a gradient norm that rose to more than so many times its largest in the first quarter is mentioned."""
INVALID = 0.1
"""More invalid actions per trajectory than this are mentioned."""

NOTES = (
    "Moving averages take a twentieth of the values, but 5 to 100, and stand at the last step that they cover. "
    "“At the end”, “best” and arrows are about moving averages; medians and largest values are about single "
    f"log entries. Metrics with fewer than {SMOOTHED_FROM} values have no moving average: there, too, single values "
    "are meant.",
    f"What stands out: a reward or a number of searches that ends under {FALLEN:.0%} of its best; a KL or a gradient "
    f"norm that rose to more than {RISEN:.0f} times its largest in the first quarter; a gradient of exactly 0 at the "
    "end; an entropy that has doubled or fallen to a tenth; values that are not finite; more than "
    f"{INVALID:g} invalid actions per trajectory; an explained variance of 0 or less; a search engine that was down; "
    "fewer optimizer steps than planned. These limits point at curves that are worth a look. They are no test of "
    "whether a run has collapsed.",
    "The first alarm is that of the collapse guard's rules, as it would have come while the run trained "
    "(docs/stability.md says how far to trust them). Settings are those in which runs differ; “–” is one that the run "
    "left at its default. Runs that were told the same but for their seeds are one line in a band, which is the mean "
    "of those that have come that far.",
)

ROLLOUT_NOTE = (
    "The picture of a rollout shows the last one of the main process, a line per trajectory; “standing still” is the "
    "time in which no row went on generating because a reply was due that was not there. Prefills are drawn wide "
    "enough to be seen. In lock-step prefill counts as decoding, and how long a row decoded is taken from its tokens."
)


def write_report(runs: Sequence[Run] | Mapping[str, LogHistory], folder: str | Path, by_name: bool = False) -> Path:
    """Write `report.png` and `report.html`, and `rollouts.png` where a run has kept the times of its last rollout.

    Args:
        runs: What `load_runs` returns, or the name of each run and its `trainer.state.log_history`.
        folder: Where they go; made if missing.
        by_name: As in `run_groups.group_runs`: runs whose names differ in the number at their end alone are seeds of
            one method, and drawn as one line.

    Returns:
        The path of the page. It needs no other file.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: There is no run, or none of them has any of the metrics of `plots.PANELS`.
    """
    if isinstance(runs, Mapping):
        runs = [Run(name, history) for name, history in runs.items()]
    if not runs:
        raise ValueError("`runs` is empty, but must hold at least one run.")
    groups = group_runs(runs, by_name)
    runs = [run for group in groups for run in group.runs]
    picture = draw_runs(runs, by_name)
    rollouts = {run.name: run.rollout for run in runs if run.rollout is not None}
    rollout_picture = draw_rollouts(rollouts) if rollouts else None
    notes = (*NOTES, ROLLOUT_NOTE) if rollouts else NOTES
    found = [findings(run) for run in runs]
    rows = figures_table(runs)
    page = render_page(Page(runs, places(groups), summary_of(runs), picture, rows, found, notes, rollout_picture))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "report.png", picture)
    if rollout_picture is not None:
        write_whole(folder / "rollouts.png", rollout_picture)
    write_whole(folder / "report.html", page.encode("utf-8"))
    return folder / "report.html"


def last_and_best(series: Series) -> Figure:
    """Last value of the moving average, its best, and the step at which the best was reached."""
    average = series.smoothed()
    step, best = _largest(average)
    return Figure(f"{average.values[-1]:.3f} at the end", f"best {best:.3f} at step {step:,}")


def median_and_largest(series: Series) -> Figure:
    """Median and largest of the values as they were logged, and the step of the largest."""
    step, largest = _largest(series)
    return Figure(f"median {statistics.median(series.values):.3g}", f"largest {largest:.3g} at step {step:,}")


def first_to_last(series: Series) -> Figure:
    """First and last value of the moving average."""
    average = series.smoothed().values
    return Figure(f"{average[0]:.3g} → {average[-1]:.3g}")


def _largest(series: Series) -> tuple[int, float]:
    """The largest value, after the step at which it first was."""
    largest = max(series.values)
    return series.steps[series.values.index(largest)], largest


FIGURES: Mapping[str, Callable[[Series], Figure]] = {
    "reward": last_and_best,
    "eval_reward": last_and_best,
    "rewards/exact_match_reward/mean": last_and_best,
    "eval_rewards/exact_match_reward/mean": last_and_best,
    "clip_fraction/token": median_and_largest,
    "clip_fraction/turn": median_and_largest,
    "clip_fraction/sequence": median_and_largest,
    "clip_ratio/region_mean": median_and_largest,
    "kl_to_old": median_and_largest,
    "turns/ratio_max": median_and_largest,
    "kl": median_and_largest,
    "grad_norm": median_and_largest,
    "entropy": first_to_last,
    "rollout/turns_per_trajectory": first_to_last,
    "rollout/searches_per_trajectory": first_to_last,
    "rollout/invalid_actions_per_trajectory": first_to_last,
    "completions/mean_length": first_to_last,
    "critic/explained_variance": last_and_best,
    "critic/value_loss": first_to_last,
    "learning_rate": first_to_last,
}
"""Metric -> what is said about it, in the order of the table."""


def figures_table(runs: Sequence[Run]) -> list[Row]:
    """Optimizer steps, then the metrics of `FIGURES` that at least one run has."""
    rows = [Row("Optimizer steps", "step", tuple(_steps(run) for run in runs))]
    titles = {panel.metric: panel.title for panel in PANELS}
    for metric, describe in FIGURES.items():
        figures = tuple(describe(series) if (series := run.series(metric)).values else None for run in runs)
        title = titles[metric.removeprefix("eval_")]
        rows.append(Row(f"{title}, evaluation" if metric.startswith("eval_") else title, metric, figures))
    return [row for row in rows if any(figure is not None for figure in row.figures)]


def summary_of(runs: Sequence[Run]) -> list[list[str]]:
    """A header, and a line per run: how far it got, its reward, the first alarm, and settings in which runs differ."""
    settings = differing_settings(runs)
    lines = [["optimizer steps", "reward at the end", "best reward", "first alarm", *settings]]
    for place, run in enumerate(runs):
        steps, reward = _steps(run), run.series("reward")
        rewards = [f"{reward.smoothed().values[-1]:.3f}", _best(reward)] if reward.values else ["–", "–"]
        alarms = detect(run.log_history)
        first = f"{alarms[0].rule.name}, step {alarms[0].step:,}" if alarms else "none"
        lines.append(
            [f"{steps.value} {steps.detail}".strip(), *rewards, first, *(v[place] for v in settings.values())]
        )
    return lines


def _best(series: Series) -> str:
    step, best = _largest(series.smoothed())
    return f"{best:.3f}, step {step:,}"


def _steps(run: Run) -> Figure:
    return Figure(f"{run.last_step:,}", f"of {run.max_steps:,}" if run.max_steps else "")


def findings(run: Run) -> list[str]:
    """What stands out, a sentence each, by the rules of `NOTES`."""
    return [sentence for check in CHECKS for sentence in check(run)]


def _unfinished(run: Run) -> Iterator[str]:
    if run.max_steps and run.last_step < run.max_steps:
        yield f"It is under way or ended early: {run.last_step:,} of {run.max_steps:,} optimizer steps are logged."


def _not_finite(run: Run) -> Iterator[str]:
    for name in sorted({name for entry in run.log_history for name in entry}):
        if steps := run.non_finite_steps(name):
            yield f"{name} was NaN or infinite in {len(steps):,} log entries, first at step {steps[0]:,}."


def _fallen(run: Run) -> Iterator[str]:
    for title, metric in (("The reward", "reward"), ("Searches per trajectory", "rollout/searches_per_trajectory")):
        average = run.series(metric).smoothed()
        step, best = _largest(average) if average.values else (0, 0.0)
        if best > 0 and (last := average.values[-1]) < FALLEN * best:
            share = f", {last / best:.0%} of it" if last >= 0 else ""
            yield f"{title} fell from a best average of {best:.3g} at step {step:,} to {last:.3g} at the end{share}."


def _risen(run: Run) -> Iterator[str]:
    for title, metric in (("The KL to the old policy", "kl_to_old"), ("The gradient norm", "grad_norm")):
        average = run.series(metric).smoothed()
        early = max(average.values[: len(average.values) // 4], default=0.0)
        if early > 0 and max(average.values) > RISEN * early:
            step, largest = _largest(average)
            yield f"{title} rose to {largest:.3g} on average at step {step:,}, from at most {early:.3g} early on."


def _no_gradient(run: Run) -> Iterator[str]:
    average = run.series("grad_norm").smoothed()
    if average.values and average.values[-1] == 0:
        yield "The gradient is 0 at the end: nothing is learned any more."


def _entropy(run: Run) -> Iterator[str]:
    average = run.series("entropy").smoothed().values
    if average and not average[0] / 10 <= average[-1] <= average[0] * 2:
        yield f"The entropy went from {average[0]:.3g} to {average[-1]:.3g} nats per token."


def _invalid_actions(run: Run) -> Iterator[str]:
    average = run.series("rollout/invalid_actions_per_trajectory").smoothed().values
    if average and average[-1] > INVALID:
        yield f"At the end a trajectory has {average[-1]:.3g} invalid actions on average."


def _search_down(run: Run) -> Iterator[str]:
    down = run.series("rollout/masked_share")
    if any(down.values):
        step, share = _largest(down)
        yield f"The search engine was down: at step {step:,}, for {share:.0%} of the trajectories."


def _critic(run: Run) -> Iterator[str]:
    average = run.series("critic/explained_variance").smoothed().values
    if average and average[-1] <= 0:
        yield f"The critic explains nothing at the end: its explained variance is {average[-1]:.3g}."


CHECKS = (_unfinished, _not_finite, _fallen, _risen, _no_gradient, _entropy, _invalid_actions, _search_down, _critic)
"""In the order in which a card lists what they find."""


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        prog="sorl report",
        description="Curves and figures of training runs, side by side, as a PNG and as one HTML page.",
        epilog="A run that is still training can be read once it has saved a checkpoint.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="run", help="its `output_dir`: holds trainer_state.json")
    where = "default: %(default)s"
    parser.add_argument("-o", "--output", type=Path, default=Path("report"), metavar="DIR", help=where)
    seeds = "take runs whose names differ in the number at their end alone for seeds of one method, drawn as one line"
    parser.add_argument("--seeds_by_name", action="store_true", help=seeds)
    arguments: argparse.Namespace = parser.parse_args(words)
    return arguments


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse_arguments(words)
    with mistakes():
        page = write_report(load_runs(arguments.runs), arguments.output, arguments.seeds_by_name)
    print(f"Curves: {page.with_name('report.png')}\nPage:   {page}")


if __name__ == "__main__":
    sys.exit(run_command(main))
