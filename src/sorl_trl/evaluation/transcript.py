"""One trajectory as text that a person can read."""

from __future__ import annotations

from sorl_trl.qa import Question, score_answer
from sorl_trl.types import Observation, Trajectory


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
