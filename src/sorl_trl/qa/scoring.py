"""What a trajectory is worth: pure functions, shared by the rewards of training and by evaluation.

Only what the policy generated is graded (`Trajectory.answer`): a passage that holds `<answer>` tags earns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from sorl_trl.qa.answers import contains_answer, exact_match, token_f1
from sorl_trl.types import ActionKind, Observation, Trajectory, Turn


def score_exact_match(trajectory: Trajectory, golden_answers: Sequence[str]) -> float:
    """`exact_match` of the trajectory's answer; 0.0 without one."""
    return exact_match(trajectory.answer, golden_answers)


def score_f1(trajectory: Trajectory, golden_answers: Sequence[str]) -> float:
    """`token_f1` of the trajectory's answer; 0.0 without one."""
    return token_f1(trajectory.answer, golden_answers)


def score_format(trajectory: Trajectory) -> float:
    """1.0 if the policy answered and made no invalid action on the way, else 0.0."""
    is_valid = all(turn.action.kind is not ActionKind.INVALID for turn in trajectory.turns)
    return float(is_valid and trajectory.answer is not None)


def score_search_hits(trajectory: Trajectory, golden_answers: Sequence[str]) -> list[float]:
    """One score per turn: 1.0 for the first search that brought in a golden answer, else 0.0.

    Only the first counts, or repeating one good search would pay more than answering. The golden answer must be, as
    whole words (`contains_answer`), both in a passage found and in the text of the observation right after the turn:
    the passage may have been cut, and the text has words of its own ("Doc 1").
    """
    segments = trajectory.segments
    hits = [
        _is_search_hit(segment, following, golden_answers)
        for segment, following in zip_longest(segments, segments[1:])
        if isinstance(segment, Turn)
    ]
    return [float(hit and not any(hits[:turn])) for turn, hit in enumerate(hits)]


def _is_search_hit(turn: Turn, following: Turn | Observation | None, golden_answers: Sequence[str]) -> bool:
    if turn.action.kind is not ActionKind.SEARCH or not isinstance(following, Observation):
        return False
    texts = [f"{passage.title}\n{passage.text}" for passage in following.passages]
    found = [gold for gold in golden_answers if any(contains_answer(text, [gold]) for text in texts)]
    return bool(found) and contains_answer(following.text, found)
