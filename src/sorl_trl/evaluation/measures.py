"""What one trajectory is worth and what it took, in numbers: with the scorer that rewards use."""

from __future__ import annotations

from sorl_trl import qa
from sorl_trl.records.evaluated import MEASURES
from sorl_trl.rollout import rollout_statistics
from sorl_trl.types import Trajectory


def measure(question: qa.Question, trajectory: Trajectory) -> dict[str, float | None]:
    """Take every measure of `MEASURES`; one that does not apply is `None`.

    That is choice accuracy of an open question, and everything after an infrastructure failure, which says nothing
    about the policy.
    """
    if trajectory.stop_reason.is_infrastructure_failure:
        return dict.fromkeys(MEASURES)
    return {**_scores(question, trajectory), **_counts(trajectory)}


def _scores(question: qa.Question, trajectory: Trajectory) -> dict[str, float | None]:
    golden, options = question.golden_answers, question.options
    return {
        "correct": qa.score_answer(trajectory, golden, options),
        "exact_match": qa.score_exact_match(trajectory, golden),
        "f1": qa.score_f1(trajectory, golden),
        "sub_exact_match": qa.score_sub_exact_match(trajectory, golden),
        "choice_accuracy": qa.score_choice(trajectory, golden, options) if options else None,
    }


def _counts(trajectory: Trajectory) -> dict[str, float]:
    statistics = rollout_statistics([trajectory])
    return {
        "searches": statistics["searches_per_trajectory"],
        "turns": statistics["turns_per_trajectory"],
        "invalid_actions": statistics["invalid_actions_per_trajectory"],
        "neutralized": statistics["neutralized_per_trajectory"],
        "generated_tokens": float(sum(len(turn.token_ids) for turn in trajectory.turns)),
        "observation_tokens": float(sum(len(seen.token_ids) for seen in trajectory.observations)),
    }
