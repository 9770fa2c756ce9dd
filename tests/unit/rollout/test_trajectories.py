from __future__ import annotations

from sorl_trl.rollout import rollout_statistics
from sorl_trl.types import Action, ActionKind, Observation, StopReason, Trajectory, Turn

from .fakes import PARIS


def turn(kind: ActionKind, *token_ids: int, content: str = "") -> Turn:
    return Turn(token_ids, "", Action(kind, content))


FRANCE = turn(ActionKind.SEARCH, 5, 6, content="France")
FOUND = Observation((8, 9, 5), "", (PARIS, PARIS), truncated=True, neutralized=2)
FEEDBACK = Observation((4,), "")
ANSWERED = Trajectory((1,), (FRANCE, FOUND, turn(ActionKind.ANSWER, 7)), StopReason.ANSWERED)
DOWN = Trajectory((1,), (turn(ActionKind.INVALID, 3), FEEDBACK, FRANCE), StopReason.SEARCH_UNAVAILABLE)


def test_statistics_of_a_batch() -> None:
    unanswered = Trajectory((1,), (FRANCE, Observation((4,), ""), FRANCE), StopReason.MAX_TURNS)
    statistics = rollout_statistics([ANSWERED, DOWN, unanswered, ANSWERED])
    reasons = {key: share for key, share in statistics.items() if key.startswith("stop_reason/")}
    assert {key for key, share in reasons.items() if share} == {
        "stop_reason/answered",
        "stop_reason/search_unavailable",
        "stop_reason/max_turns",
    }
    assert len(reasons) == len(StopReason) and sum(reasons.values()) == 1
    assert {key: statistics[key] for key in statistics.keys() - reasons.keys()} == {
        "turns_per_trajectory": 2.0,
        "searches_per_trajectory": 3 / 4,
        "tool_calls_per_trajectory": 0.0,
        "invalid_actions_per_trajectory": 1 / 4,
        "neutralized_per_trajectory": 1.0,
        "masked_share": 1 / 4,
        "tokens_per_turn": 13 / 8,
        "tokens_per_observation": 8 / 4,
        "truncated_observation_share": 2 / 4,
        "unique_query_share": 1 / 3,
        "passages_per_search": 4 / 3,
        "empty_search_share": 1 / 3,
    }


def test_an_empty_batch_has_the_same_keys() -> None:
    empty = rollout_statistics([])
    assert empty.keys() == rollout_statistics([ANSWERED]).keys()
    assert set(empty.values()) == {0.0}
