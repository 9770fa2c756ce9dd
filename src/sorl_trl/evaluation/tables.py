"""Writes results and comparisons as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sorl_trl.evaluation.figures import Figure

_SCORES = {"exact_match": "EM", "f1": "F1", "sub_exact_match": "sub-EM", "choice_accuracy": "choice"}
_COUNTS = {"searches": "searches", "turns": "turns", "generated_tokens": "tokens"}
_CUT = ("turn_limit", "trajectory_limit", "context_limit", "max_turns")


def format_results(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Write a line per dataset, a line with the mean of several datasets, and an explanation of the figures.

    They are scores with their 95 % intervals, counts per trajectory, the share that was answered, and the number of
    masked trajectories. A figure that does not apply is a dash.
    """
    if any("environment" in summary for summary in summaries):
        return _format_tasks(summaries)
    n = max(round(summary["trajectories"] / summary["questions"]) for summary in summaries)
    best = [f"pass@{n}"] if n > 1 else []
    header = ["dataset", "questions", *_SCORES.values(), *best, *_COUNTS.values(), "answered", "masked"]
    rows = [_result(summary, with_best=n > 1) for summary in summaries]
    if len(summaries) > 1:
        scores = [_average([summary["means"].get(name) for summary in summaries]) for name in _SCORES]
        rows.append(["**mean**", "-", *scores, *["-"] * (len(header) - len(scores) - 2)])
    return _table(header, rows) + (
        "\nIn brackets: 95 % bootstrap intervals over questions. Searches, turns, tokens: per trajectory. Masked "
        "trajectories, which an infrastructure failure ended, are in no mean; started again, the run makes them anew. "
        "Mean: over the datasets, each with the same weight.\n"
    )


def _format_tasks(summaries: Sequence[Mapping[str, Any]]) -> str:
    """`format_results` for an environment: the scores that there are, counts, and a line for each of its measures."""
    n = max(round(summary["trajectories"] / summary["questions"]) for summary in summaries)
    scores = [name for name in _SCORES if any(name in summary["means"] for summary in summaries)]
    best = ["correct"] if any("correct" in summary["best_of_n"] for summary in summaries) else []
    headers = [*(_SCORES[name] for name in scores), *(f"pass@{n}" for _ in best)]
    header = ["dataset", "tasks", *headers, "turns", "tokens", "cut", "masked"]
    rows = [_task_result(summary, scores, best) for summary in summaries]
    measured = {summary["name"]: summary.get("environment", {}) for summary in summaries}
    names = dict.fromkeys(name for each in measured.values() for name in each)
    measures = [[name, *(_with_interval(each.get(name)) for each in measured.values())] for name in names]
    return "\n".join(
        [
            _table(header, rows),
            f"Measured by the environment:\n\n{_table(['measure', *measured], measures)}",
            "In brackets: 95 % bootstrap intervals over tasks. Turns, tokens: means over trajectories. Cut: the share "
            "that a limit of tokens or turns ended. Masked trajectories, whose environment was down, are in no mean; "
            "started again, the run makes them anew.\n",
        ]
    )


def format_comparison(comparisons: Sequence[Mapping[str, Any]], before: str, after: str) -> str:
    """Write a line per dataset and measure: both means, their difference with its 95 % interval, and p."""
    rows = [
        [
            comparison["name"],
            str(comparison["questions"]),
            _SCORES.get(measure, measure),
            f"{figure['before']:.3f}",
            f"{figure['after']:.3f}",
            _with_interval(figure, sign="+"),
            f"{figure['p']:.4f}",
        ]
        for comparison in comparisons
        for measure, figure in comparison["measures"].items()
    ]
    left_out = sum(comparison["left_out"] for comparison in comparisons)
    return (
        _table(["dataset", "questions", "measure", "A", "B", "B - A", "p"], rows)
        + f"\nA: {before}. B: {after}. In brackets: 95 % intervals; p: two-sided; both from a paired bootstrap over "
        + "questions. Left out because only one run was asked them, or a run has no unmasked trajectory of them: "
        + f"{left_out} questions.\n"
    )


def _result(summary: Mapping[str, Any], with_best: bool) -> list[str]:
    means = summary["means"]
    scores = [_with_interval(means.get(name)) for name in _SCORES]
    best = [_with_interval(summary["best_of_n"].get("correct"))] if with_best else []
    counts = [_mean(means.get(name)) for name in _COUNTS]
    ended = [f"{summary['stop_reasons']['answered']:.3f}", str(summary["masked"])]
    return [summary["name"], str(summary["questions"]), *scores, *best, *counts, *ended]


def _task_result(summary: Mapping[str, Any], scores: Sequence[str], best: Sequence[str]) -> list[str]:
    figures = [summary["means"].get(name) for name in scores] + [summary["best_of_n"].get(name) for name in best]
    counts = [_mean(summary["means"].get(name)) for name in ("turns", "generated_tokens")]
    cut = sum(summary["stop_reasons"][reason] for reason in _CUT)
    ended = [f"{cut:.3f}", str(summary["masked"])]
    return [summary["name"], str(summary["questions"]), *map(_with_interval, figures), *counts, *ended]


def _mean(figure: Figure | None) -> str:
    return f"{figure['mean']:.2f}" if figure else "-"


def _average(figures: Sequence[Figure | None]) -> str:
    means = [figure["mean"] for figure in figures if figure]
    return f"{sum(means) / len(means):.3f}" if means else "-"


def _with_interval(figure: Figure | None, sign: str = "") -> str:
    if figure is None:
        return "-"
    mean, low, high = (f"{figure[name]:{sign}.3f}" for name in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Pad columns to one width, so that the table reads well as plain text, too."""
    cells = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"
