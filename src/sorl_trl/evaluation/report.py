"""Evaluation results as a table of text."""

from __future__ import annotations

from collections.abc import Mapping

from sorl_trl.evaluation.runner import EvaluationResult


def format_report(results: Mapping[str, EvaluationResult]) -> str:
    """One line per named result: number of questions, EM, F1, EM by hops, searches per trajectory, share answered.

    A figure that a result does not have is a dash. Raises ValueError if there is no result.
    """
    if not results:
        raise ValueError("results is empty; it must hold at least one")
    hops = sorted({hops for result in results.values() for hops in result.hops()})
    header = ["", "questions", "EM", "F1", *(f"EM {number}-hop" for number in hops), "searches", "answered"]
    return _align([header, *(_row(name, result, hops) for name, result in results.items())])


def _row(name: str, result: EvaluationResult, hops: list[int]) -> list[str]:
    metrics = result.metrics()
    shown = ["exact_match", "f1", *(f"exact_match/hops_{number}" for number in hops)]
    shown += ["searches_per_trajectory", "stop_reason/answered"]
    return [name, str(len(result.questions)), *(_figure(metrics.get(key)) for key in shown)]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _align(rows: list[list[str]]) -> str:
    """Names to the left, figures to the right, a rule under the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *figures in rows:
        cells = [figure.rjust(width) for figure, width in zip(figures, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *cells]))
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
