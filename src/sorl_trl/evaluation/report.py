"""Evaluated trajectories in memory as text: a table by the number of hops, and one trajectory to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sorl_trl.qa import Question, score_answer
from sorl_trl.records.evaluated import EvaluatedTrajectory
from sorl_trl.types import Observation, StopReason, Trajectory


def mean_measure(rows: Sequence[EvaluatedTrajectory], name: str) -> float | None:
    """Average one of `MEASURES` over the trajectories that have it; None if none has."""
    values = [value for row in rows if (value := row.measures[name]) is not None]
    return sum(values) / len(values) if values else None


def split_by_hops(rows: Sequence[EvaluatedTrajectory]) -> dict[int, list[EvaluatedTrajectory]]:
    """Group trajectories by their question's hops, ascending; those whose question does not say are left out."""
    hops = sorted({row.question.metadata["hops"] for row in rows if row.question.metadata.get("hops") is not None})
    return {number: [row for row in rows if row.question.metadata.get("hops") == number] for number in hops}


def format_report(results: Mapping[str, Sequence[EvaluatedTrajectory]]) -> str:
    """Write a line per named result: trajectories, EM, F1, EM by hops, searches per trajectory, share answered.

    A figure that a result does not have is a dash. There is at least one result, and each has a trajectory.
    """
    hops = sorted({number for rows in results.values() for number in split_by_hops(rows)})
    header = ["", "trajectories", "EM", "F1", *(f"EM {number}-hop" for number in hops), "searches", "answered"]
    return _align([header, *(_row(name, rows, hops) for name, rows in results.items())])


def _row(name: str, rows: Sequence[EvaluatedTrajectory], hops: Sequence[int]) -> list[str]:
    parts = split_by_hops(rows)
    figures = [
        mean_measure(rows, "exact_match"),
        mean_measure(rows, "f1"),
        *(mean_measure(parts.get(number, []), "exact_match") for number in hops),
        mean_measure(rows, "searches"),
        sum(row.trajectory.stop_reason is StopReason.ANSWERED for row in rows) / len(rows),
    ]
    return [name, str(len(rows)), *("-" if figure is None else f"{figure:.3f}" for figure in figures)]


def _align(rows: list[list[str]]) -> str:
    """Names to the left, figures to the right, a rule under the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *figures in rows:
        cells = [figure.rjust(width) for figure, width in zip(figures, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *cells]))
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def format_trajectory(question: Question, trajectory: Trajectory) -> str:
    """Write the question, each turn and observation on a line of its own, and the verdict."""
    lines = [f"Question     {question.question}"]
    for segment in trajectory.segments:
        speaker = "Environment" if isinstance(segment, Observation) else "Policy"
        lines.append(f"{speaker:<12} {_printable(segment.text)}")
    verdict = "right" if score_answer(trajectory, question.golden_answers, question.options) else "wrong"
    golden = " or ".join(question.golden_answers)
    lines.append(f"{'Verdict':<12} {verdict} (gold: {golden}; stopped: {trajectory.stop_reason.value})")
    return "\n".join(lines)


def _printable(text: str) -> str:
    """On one line, without the escape sequences that a passage could steer a terminal with."""
    return "".join(character if character.isprintable() else "\ufffd" for character in " ".join(text.split()))
