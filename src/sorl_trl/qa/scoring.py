"""Scores of trajectories: pure functions, shared by rewards and evaluation.

Only text that the policy generated is graded (`Trajectory.answer`): a passage with `<answer>` tags earns nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from sorl_trl.qa.answers import contains_answer, exact_match, normalize_answer, token_f1
from sorl_trl.qa.choices import named_letter, right_letter
from sorl_trl.types import ActionKind, Observation, Trajectory, Turn

_VERDICTS = frozenset({"yes", "no", "maybe"})


def score_f1_plus(trajectory: Trajectory, golden_answers: Sequence[str]) -> float:
    """Score F1+ = F1 − 0.1·[no search] − 0.1·[no answer], in [−0.2, 1].

    This is the reward of Search-R1++ (arXiv 2602.19526), known to us second-hand. F1 alone gives 0 both to a wrong
    answer and to none, so a policy loses nothing by not answering; here a wrong answer is worth more than none. A
    search that found nothing or was refused counts as a search; a call of another tool does not.
    """
    has_searched = any(turn.action.kind is ActionKind.SEARCH for turn in trajectory.turns)
    missing = (not has_searched) + (trajectory.answer is None)
    return token_f1(trajectory.answer, golden_answers) - 0.1 * missing


def score_choice(trajectory: Trajectory, golden_answers: Sequence[str], options: Mapping[str, str]) -> float:
    """Score 1.0 if the answer names the right option and no other, by letter or text (`named_letter`), else 0.0.

    There is one golden answer, the text of the right option; `options` maps letters to texts.

    Raises:
        ValueError: The golden answer is not the text of exactly one option, as for an open question.
    """
    right = right_letter(golden_answers, options)
    return float(named_letter(trajectory.answer or "", options) == right)


def score_answer(trajectory: Trajectory, golden_answers: Sequence[str], options: Mapping[str, str]) -> float:
    """Score 1.0 for a right answer: by `score_choice` if there are options, else by `exact_match`."""
    if options:
        return score_choice(trajectory, golden_answers, options)
    return exact_match(trajectory.answer, golden_answers)


def score_search_hits(trajectory: Trajectory, golden_answers: Sequence[str]) -> list[float]:
    """Score each turn: 1.0 for the first search that found a golden answer, else 0.0.

    Only the first counts, or repeating one good search would pay more than answering. The golden answer must occur, as
    whole words (`contains_answer`), both in a passage and in the text of the observation right after the turn, because
    the passage may have been cut, and the text has its own words ("Doc 1"). "yes", "no" and "maybe" never count,
    because nearly every passage contains a "no".
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
    telling = [gold for gold in golden_answers if normalize_answer(gold) not in _VERDICTS]
    found = [gold for gold in telling if any(contains_answer(text, [gold]) for text in texts)]
    return bool(found) and contains_answer(following.text, found)
