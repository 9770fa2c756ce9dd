"""Results and comparisons as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from sorl_trl.evaluation.aggregate import DatasetSummary
from sorl_trl.evaluation.bootstrap import Estimate
from sorl_trl.evaluation.compare import Comparison

_SCORES = {"exact_match": "EM", "f1": "F1", "sub_exact_match": "sub-EM", "choice_accuracy": "choice"}
_COUNTS = {"searches": "searches", "turns": "turns", "generated_tokens": "tokens"}


def format_results(summaries: Sequence[DatasetSummary]) -> str:
    """Write a line per dataset, a line with the mean of several datasets, and what the figures mean.

    Scores with their 95 % intervals, counts per trajectory, the share that was answered and the number of masked
    trajectories. A figure that does not apply is a dash.
    """
    n = max(round(summary.trajectories / summary.questions) for summary in summaries)
    best = [f"pass@{n}"] if n > 1 else []
    header = ["dataset", "questions", *_SCORES.values(), *best, *_COUNTS.values(), "answered", "masked"]
    rows = [
        [
            *(summary.name, str(summary.questions)),
            *_figures(summary, with_best=n > 1),
            *(f"{summary.stop_reasons['answered']:.3f}", str(summary.masked)),
        ]
        for summary in summaries
    ]
    if len(summaries) > 1:
        scores = [
            _average([summary.means[name].mean for summary in summaries if name in summary.means]) for name in _SCORES
        ]
        rows.append(["**mean**", "-", *scores, *["-"] * (len(header) - len(scores) - 2)])
    return _table(header, rows) + (
        "\nIn brackets: 95 % bootstrap intervals over questions. Searches, turns, tokens: per trajectory. Masked "
        "trajectories, which an infrastructure failure ended, are in no mean; started again, the run makes them anew. "
        "Mean: over the datasets, each with the same weight.\n"
    )


def format_comparison(comparisons: Sequence[Comparison], before: str, after: str) -> str:
    """Write a line per dataset and measure: both means, their difference with its 95 % interval, and p."""
    rows = [
        [
            comparison.name,
            str(comparison.questions),
            _SCORES.get(measure, measure),
            f"{comparison.before[measure]:.3f}",
            f"{comparison.after[measure]:.3f}",
            _with_interval(difference, signed=True),
            f"{difference.p_value:.4f}",
        ]
        for comparison in comparisons
        for measure, difference in comparison.differences.items()
    ]
    left_out = sum(comparison.left_out for comparison in comparisons)
    return (
        _table(["dataset", "questions", "measure", "A", "B", "B - A", "p"], rows)
        + f"\nA: {before}. B: {after}. In brackets: 95 % intervals; p: two-sided; both from a paired bootstrap over "
        + "questions. Left out because only one run was asked them, or a run has no unmasked trajectory of them: "
        + f"{left_out} questions.\n"
    )


def _average(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.3f}" if values else "-"


def _figures(summary: DatasetSummary, with_best: bool) -> list[str]:
    means, best = summary.means, summary.best_of_n
    scores = [_with_interval(means.get(name)) for name in _SCORES]
    scores += [_with_interval(best.get("correct"))] if with_best else []
    return scores + [f"{means[name].mean:.2f}" if name in means else "-" for name in _COUNTS]


def _with_interval(estimate: Estimate | None, signed: bool = False) -> str:
    if estimate is None:
        return "-"
    mean, low, high = (f"{value:{'+' if signed else ''}.3f}" for value in (estimate.mean, *estimate.interval))
    return f"{mean} [{low}, {high}]"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to one width, so that the table reads well as plain text too."""
    # A bar would end its cell.
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"
