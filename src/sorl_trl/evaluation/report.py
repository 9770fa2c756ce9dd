"""Evaluated trajectories in memory: means, groups by the number of hops, and one trajectory to read."""

from __future__ import annotations

from collections.abc import Sequence

from sorl_trl.qa import Question, score_answer
from sorl_trl.records.evaluated import EvaluatedTrajectory
from sorl_trl.types import Observation, Trajectory


def mean_measure(rows: Sequence[EvaluatedTrajectory], name: str) -> float | None:
    """Average one of `MEASURES` over the trajectories that have it; None if none has."""
    values = [value for row in rows if (value := row.measures[name]) is not None]
    return sum(values) / len(values) if values else None


def split_by_hops(rows: Sequence[EvaluatedTrajectory]) -> dict[int, list[EvaluatedTrajectory]]:
    """Group trajectories by their question's hops, ascending; those whose question does not say are left out."""
    hops = sorted({row.question.metadata["hops"] for row in rows if row.question.metadata.get("hops") is not None})
    return {number: [row for row in rows if row.question.metadata.get("hops") == number] for number in hops}


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
