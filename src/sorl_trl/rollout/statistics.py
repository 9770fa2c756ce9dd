"""What a batch of trajectories looks like, in numbers to log under `rollout/`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from sorl_trl.rollout.timeline import Timeline
from sorl_trl.types import ActionKind, Observation, StopReason, Trajectory, Turn


def rollout_statistics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Compute means and shares over a batch. The keys are always the same; a mean over nothing is 0.

    A search, or the call of another tool, counts once it was answered: not in the last turn, which is not answered any
    more, nor with the engine down. What made the environment end a trajectory was answered.
    """
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    observations = [observation for trajectory in trajectories for observation in trajectory.observations]
    searches = [search for trajectory in trajectories for search in _answered_searches(trajectory)]
    found = [len(observation.passages) for _, observation in searches]
    per_trajectory = len(trajectories)
    statistics = {
        "turns_per_trajectory": _ratio(len(turns), per_trajectory),
        "searches_per_trajectory": _ratio(len(searches), per_trajectory),
        "tool_calls_per_trajectory": _ratio(sum(map(_answered_calls, trajectories)), per_trajectory),
        "invalid_actions_per_trajectory": _ratio(
            sum(turn.action.kind is ActionKind.INVALID for turn in turns), per_trajectory
        ),
        "neutralized_per_trajectory": _ratio(sum(seen.neutralized for seen in observations), per_trajectory),
        "masked_share": _ratio(sum(t.stop_reason.is_infrastructure_failure for t in trajectories), per_trajectory),
        "tokens_per_turn": _ratio(sum(len(turn.token_ids) for turn in turns), len(turns)),
        "tokens_per_observation": _ratio(sum(len(seen.token_ids) for seen in observations), len(observations)),
        "truncated_observation_share": _ratio(sum(seen.truncated for seen in observations), len(observations)),
        "unique_query_share": _ratio(len({turn.action.content for turn, _ in searches}), len(searches)),
        "passages_per_search": _ratio(sum(found), len(searches)),
        "empty_search_share": _ratio(found.count(0), len(searches)),
    }
    reasons = Counter(trajectory.stop_reason for trajectory in trajectories)
    return statistics | {f"stop_reason/{r.value}": _ratio(reasons[r], per_trajectory) for r in StopReason}


def time_statistics(timeline: Timeline) -> dict[str, float]:
    """Say where the time of a rollout went: seconds that overlap, and how many tokens were sampled in one of them."""
    return {
        "seconds_generating": timeline.seconds_generating,
        "seconds_searching": timeline.seconds_searching,
        "seconds_waiting": timeline.seconds_waiting,
        "tokens_per_second": _ratio(timeline.sampled_tokens, timeline.seconds),
    }


def _answered_searches(trajectory: Trajectory) -> list[tuple[Turn, Observation]]:
    return [
        (turn, observation)
        for turn, observation in pairwise(trajectory.segments)
        if isinstance(turn, Turn) and isinstance(observation, Observation) and turn.action.kind is ActionKind.SEARCH
    ]


def _answered_calls(trajectory: Trajectory) -> int:
    """Of tools other than a search."""
    is_done = trajectory.stop_reason is StopReason.ENVIRONMENT_DONE
    following = [*trajectory.segments[1:], Observation((), "") if is_done else None]
    return sum(
        isinstance(turn, Turn) and turn.action.kind is ActionKind.TOOL and isinstance(reply, Observation)
        for turn, reply in zip(trajectory.segments, following, strict=False)
    )


def _ratio(total: float, count: float) -> float:
    return total / count if count else 0.0
