from __future__ import annotations

from dataclasses import replace

from sorl_trl.rollout import rollout_statistics
from sorl_trl.types import Action, ActionKind, Observation, StopReason, Trajectory, Turn
from tests.unit.evaluation.trajectories import TWO_AGENTS

from .fakes import PARIS


def turn(kind: ActionKind, *token_ids: int, content: str = "") -> Turn:
    return Turn(token_ids, "", Action(kind, content))


FRANCE = turn(ActionKind.SEARCH, 5, 6, content="France")
FOUND = Observation((8, 9, 5), "", (PARIS, PARIS), truncated=True, neutralized=2)
FEEDBACK = Observation((4,), "")
ANSWERED = Trajectory((1,), (FRANCE, FOUND, turn(ActionKind.ANSWER, 7)), StopReason.ANSWERED)
DOWN = Trajectory((1,), (turn(ActionKind.INVALID, 3), FEEDBACK, FRANCE), StopReason.SEARCH_UNAVAILABLE)


def test_contexts_are_laid_out_as_they_alternate() -> None:
    """What an infrastructure failure ended keeps its contexts, too, but nothing is trained on."""
    row = replace(TWO_AGENTS)
    assert row.completion_ids == [5, 6, 4, 7, 8, 9, 4, 10, 11, 14, 12, 15, 16, 13]
    assert row.context_ids == [0, 0, -1, 1, 1, 1, -2, 2, 2, 1, 1, 0, 0, 0]
    assert row.turn_ids == [0, 0, -1, -1, -1, 1, -1, 2, 2, -1, 3, -1, -1, 4]
    assert row.env_mask == [1, 1, 0, 0, 0, 1, 0, 1, 1, 0, 1, 0, 0, 1]
    assert row.logprobs == [-0.5, -0.6, 0.0, 0.0, 0.0, -0.9, 0.0, -1.0, -1.1, 0.0, -1.2, 0.0, 0.0, -1.3]
    down = replace(TWO_AGENTS, stop_reason=StopReason.ENVIRONMENT_UNAVAILABLE)
    assert (down.turn_ids, down.env_mask, down.spans, down.agents) == ([-1] * 14, [0] * 14, [], [])
    assert (down.context_ids, down.logprobs) == (row.context_ids, row.logprobs)


def test_where_turns_lie_and_what_the_policy_read_before_them() -> None:
    """A turn may be interrupted by a token of the environment's, and contexts may alternate."""
    assert TWO_AGENTS.spans == [(0, 2), (5, 6), (7, 9), (10, 11), (13, 14)]
    assert [TWO_AGENTS.read_before(start) for start, _ in TWO_AGENTS.spans][1:3] == [[4, 7, 8], [4]]
    assert TWO_AGENTS.shown(2, 7) == [7, 8, 9]
    first, seen = turn(ActionKind.MESSAGE, 5), Observation((8,), "")
    last = Observation((9,), "")
    segments = (first, seen, replace(first, resumes=True), last, first, last)
    interrupted = Trajectory((1,), segments, StopReason.MAX_TURNS)
    assert (interrupted.turn_ids, interrupted.spans) == ([0, -1, 0, -1, 1, -1], [(0, 3), (4, 5)])
    assert (interrupted.turns, interrupted.replies) == ((first, first), (seen, last))


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
        "contexts_per_trajectory": 1.0,
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


def test_what_repeats_counts_in_no_statistic_and_answers_no_search() -> None:
    again = Observation((1, 5), "", (PARIS,), context=1, repeats=True)
    elsewhere = (FRANCE, again, replace(FOUND, context=1), replace(FRANCE, context=1), again)
    statistics = rollout_statistics([Trajectory((1,), elsewhere, StopReason.MAX_TURNS), ANSWERED])
    assert (statistics["searches_per_trajectory"], statistics["passages_per_search"]) == (1.0, 2.0)
    assert statistics["tokens_per_observation"] == 3.0
    assert statistics["contexts_per_trajectory"] == 1.5
    of_agents = rollout_statistics([TWO_AGENTS])
    assert (of_agents["contexts_per_trajectory"], of_agents["turns_per_trajectory"]) == (3.0, 5.0)
    assert (of_agents["tokens_per_observation"], of_agents["tool_calls_per_trajectory"]) == (5 / 3, 1.0)


def test_an_empty_batch_has_the_same_keys() -> None:
    empty = rollout_statistics([])
    assert empty.keys() == rollout_statistics([ANSWERED]).keys()
    assert set(empty.values()) == {0.0}
