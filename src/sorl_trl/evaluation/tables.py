"""Results and comparisons as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from sorl_trl.evaluation.aggregate import DatasetSummary, FamilySummary
from sorl_trl.evaluation.bootstrap import Estimate
from sorl_trl.evaluation.compare import Comparison

_SCORES = {"exact_match": "EM", "f1": "F1", "sub_exact_match": "sub-EM", "choice_accuracy": "choice"}
_COUNTS = {"searches": "searches", "turns": "turns", "generated_tokens": "tokens"}


def format_results(summaries: Sequence[DatasetSummary], families: Sequence[FamilySummary]) -> str:
    """Write a line per dataset, a line per family of several datasets, and what the figures mean.

    Scores with their 95 % intervals, counts per trajectory, the share that was answered and the number of masked
    trajectories. A figure that does not apply is a dash.
    """
    n = max(round(summary.trajectories / summary.questions) for summary in summaries)
    best = [f"pass@{n}"] if n > 1 else []
    header = ["dataset", "family", "questions", *_SCORES.values(), *best, *_COUNTS.values(), "answered", "masked"]
    rows = [
        [
            *(summary.name, summary.family, str(summary.questions)),
            *_figures(summary, with_best=n > 1),
            *(f"{summary.stop_reasons['answered']:.3f}", str(summary.masked)),
        ]
        for summary in summaries
    ]
    rows += [
        [f"**macro** ({len(family.datasets)})", family.family, "-", *_figures(family, with_best=n > 1), "-", "-"]
        for family in families
        if len(family.datasets) > 1
    ]
    return _table(header, rows) + (
        "\nIn brackets: 95 % bootstrap intervals over questions. Searches, turns, tokens: per trajectory. Masked "
        "trajectories, which an infrastructure failure ended, are in no mean; started again, the run makes them anew. "
        "Macro: the mean over so many datasets.\n"
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
    unscored = sum(comparison.unscored for comparison in comparisons)
    return (
        _table(["dataset", "questions", "measure", "A", "B", "B - A", "p"], rows)
        + f"\nA: {before}. B: {after}. In brackets: 95 % intervals; p: two-sided; both from a paired bootstrap over "
        + f"questions. Left out because a run has no unmasked trajectory of them: {unscored} questions.\n"
    )


def _figures(summary: DatasetSummary | FamilySummary, with_best: bool) -> list[str]:
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
