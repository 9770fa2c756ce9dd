from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sorl_trl.rollout import (
    Collector,
    Frame,
    Generation,
    RetryPolicy,
    RolloutLimits,
    SearchResponder,
    TagProtocol,
    rollout_statistics,
)
from sorl_trl.rollout.environment import ResponderRow
from sorl_trl.search import SearchUnavailable
from sorl_trl.types import Observation, StopReason, Trajectory

from .fakes import PARIS, WORDS, FakeSearch, ScriptedGenerator, check_rows, turn_of, word_tokenizer

ANSWER = turn_of("<answer> Paris </answer>")
SEARCH = turn_of("<search> capital of France </search>")
OTHER_SEARCH = turn_of("<search> Paris </search>")
SILENCE = turn_of("I should <eos>")
PROTOCOL = TagProtocol(passage_template="{text}", no_results="No", search_failed="No", invalid_feedback="I should")
FOUND = "<information> capital of France </information>"


def collect(
    scripts: dict[int, list[Generation]],
    search: FakeSearch | None = None,
    limits: RolloutLimits | None = None,
    any_active: Callable[[bool], bool] | None = None,
    window: int | None = None,
) -> tuple[list[Trajectory], ScriptedGenerator]:
    """Rows have one-token prompts: their key in `scripts`."""
    responder = SearchResponder(search or FakeSearch(), PROTOCOL, retry=RetryPolicy(attempts=2, initial_wait_s=0))
    collector = Collector(word_tokenizer(), responder, PROTOCOL, limits)
    generator = ScriptedGenerator(scripts, window)
    prompts = [(row,) for row in scripts]
    trajectories = collector.collect(prompts, generator, *([any_active] if any_active else []))
    check_rows(trajectories)
    return trajectories, generator


def collect_one(
    script: list[Generation], limits: RolloutLimits | None = None, search: FakeSearch | None = None
) -> Trajectory:
    return collect({11: script}, search, limits)[0][0]


def texts(trajectory: Trajectory) -> list[str]:
    return [segment.text for segment in trajectory.segments]


def test_search_then_answer() -> None:
    (trajectory,), generator = collect({11: [SEARCH, ANSWER]})
    assert texts(trajectory) == ["<search> capital of France </search>", FOUND, "<answer> Paris </answer>"]
    assert (trajectory.stop_reason, trajectory.answer) == (StopReason.ANSWERED, "Paris")
    assert trajectory.observations[0].passages == (PARIS,)
    observed = tuple(map(WORDS.index, FOUND.split()))
    assert generator.calls == [[(11,)], [(11, *SEARCH.token_ids, *observed)]]


def test_a_turn_is_that_of_the_agent_who_was_next_when_it_was_sampled() -> None:
    class Team(SearchResponder):
        """The planner speaks until a search is answered."""

        team = SimpleNamespace(agent="planner")

        def open(self, examples: Any) -> Any:
            self.rows = [ResponderRow(environment=self.team) for _ in super().open(examples)]
            return self.rows

        def ask(self, turns: Any) -> Any:
            self.team.agent = "searcher"
            return super().ask(turns)

    responder = Team(FakeSearch(), PROTOCOL, retry=RetryPolicy(attempts=1))
    collector = Collector(word_tokenizer(), responder, PROTOCOL)
    (trajectory,) = collector.collect([(11,)], ScriptedGenerator({11: [SILENCE, SEARCH, ANSWER]}))
    assert [turn.agent for turn in trajectory.turns] == ["planner", "planner", "searcher"]
    lost = replace(trajectory, stop_reason=StopReason.SEARCH_UNAVAILABLE)
    assert (trajectory.agents, lost.agents) == (["planner", "planner", "searcher"], [])


def test_ids_and_logprobs_are_those_that_were_sampled() -> None:
    sampled = turn_of("<answer> Paris </answer> of", logprob=-0.5)  # a last token that overhangs the tag
    turn = collect_one([sampled]).turns[0]
    assert (turn.token_ids, turn.logprobs) == (sampled.token_ids, (-0.5,) * 4)
    assert turn.action.content == "Paris"


@pytest.mark.parametrize("text", ["I should <eos>", "</search>", "<answer> </answer>", "France </answer>"])
def test_an_invalid_action_gets_feedback_and_costs_a_turn(text: str) -> None:
    bad = turn_of(text)
    trajectory = collect_one([bad, SEARCH, ANSWER])
    assert texts(trajectory)[1] == "I should"
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert collect_one([bad, bad, bad]).stop_reason is StopReason.MAX_TURNS


def test_feedback_after_an_end_of_sequence_token_is_a_message_of_its_own() -> None:
    protocol = TagProtocol(invalid_feedback="should", message_frame=Frame("<eos>", "I"))
    collector = Collector(word_tokenizer(), FakeSearch(), protocol)
    script = ScriptedGenerator({11: [SILENCE, turn_of("</search>"), ANSWER]})
    (trajectory,) = collector.collect([(11,)], script)
    assert [seen.text for seen in trajectory.observations] == ["<eos> should I", "should"]


def test_the_last_turn_does_not_search() -> None:
    search = FakeSearch()
    trajectory = collect_one([SEARCH, OTHER_SEARCH, SEARCH], RolloutLimits(max_turns=2), search)
    assert trajectory.stop_reason is StopReason.MAX_TURNS
    assert len(trajectory.turns) == 3 and len(trajectory.observations) == 2
    assert search.calls == [["capital of France"], ["Paris"]]
    assert collect_one([SEARCH, ANSWER], RolloutLimits(max_turns=1)).stop_reason is StopReason.ANSWERED


def test_a_turn_that_closes_no_action_in_time_ends_the_trajectory() -> None:
    assert collect_one([SEARCH], RolloutLimits(max_turn_tokens=4)).stop_reason is StopReason.TURN_LIMIT
    assert collect_one([SEARCH, ANSWER], RolloutLimits(max_turn_tokens=5)).stop_reason is StopReason.ANSWERED
    short = RolloutLimits(max_turn_tokens=5, max_trajectory_tokens=4)
    assert collect_one([SEARCH], short).stop_reason is StopReason.TRAJECTORY_LIMIT
    tie = RolloutLimits(max_turn_tokens=4, max_trajectory_tokens=4)
    assert collect_one([SEARCH], tie).stop_reason is StopReason.TURN_LIMIT
    last = RolloutLimits(max_turns=0, max_turn_tokens=2)
    assert collect_one([ANSWER], last).stop_reason is StopReason.TURN_LIMIT


def test_an_observation_must_leave_room_for_a_turn() -> None:
    for size, reason, observations in (
        (5 + 5, StopReason.TRAJECTORY_LIMIT, 0),
        (5 + 5 + 1, StopReason.TRAJECTORY_LIMIT, 1),
        (5 + 5 + 3, StopReason.ANSWERED, 1),
    ):
        trajectory = collect_one([SEARCH, ANSWER], RolloutLimits(max_trajectory_tokens=size))
        assert (trajectory.stop_reason, len(trajectory.observations)) == (reason, observations)


def test_the_window_ends_a_trajectory() -> None:
    """One token of prompt, five of the search, five of the observation, three of the answer."""
    for window, reason, observations, last_budget in (
        (1 + 4, StopReason.CONTEXT_LIMIT, 0, 4),  # no room to close the search
        (1 + 5, StopReason.CONTEXT_LIMIT, 0, 5),  # no room for what was found
        (1 + 5 + 5, StopReason.CONTEXT_LIMIT, 0, 8),  # nor for a token after it
        (1 + 5 + 5 + 1, StopReason.CONTEXT_LIMIT, 1, 1),
        (1 + 5 + 5 + 3, StopReason.ANSWERED, 1, 3),  # closed by the last token that fits
    ):
        limits = RolloutLimits(max_turn_tokens=8)
        (trajectory,), generator = collect({11: [SEARCH, ANSWER]}, limits=limits, window=window)
        assert (trajectory.stop_reason, len(trajectory.observations)) == (reason, observations), window
        assert generator.budgets[-1] == [last_budget], window


def test_a_prompt_that_fills_the_window_has_no_turn(caplog: pytest.LogCaptureFixture) -> None:
    collector = Collector(word_tokenizer(), FakeSearch(), PROTOCOL)
    generator = ScriptedGenerator({11: [ANSWER], 12: [ANSWER]}, window=6)
    trajectories = collector.collect([(11, 11, 11), (12,) * 6, (12,) * 9], generator)
    assert [t.stop_reason.value for t in trajectories] == ["answered", "context_limit", "context_limit"]
    assert [t.segments == () for t in trajectories] == [False, True, True]
    assert generator.calls == [[(11, 11, 11)]]
    assert "2 of 3 prompts are too long" in caplog.text and "the longest has 9 tokens" in caplog.text
    check_rows(trajectories)
    assert [len(each.completion_ids) for each in trajectories] == [3, 0, 0]
    assert rollout_statistics(trajectories)["stop_reason/context_limit"] == pytest.approx(2 / 3)


def test_rows_advance_together_and_share_one_search() -> None:
    search = FakeSearch()
    scripts = {11: [SEARCH, ANSWER], 12: [ANSWER], 13: [OTHER_SEARCH, SEARCH, ANSWER], 14: [SEARCH, SILENCE, ANSWER]}
    trajectories, generator = collect(scripts, search)
    assert search.calls == [["capital of France", "Paris"], ["capital of France"]]
    assert [len(call) for call in generator.calls] == [4, 3, 2]
    assert [trajectory.prompt_ids for trajectory in trajectories] == [(11,), (12,), (13,), (14,)]
    assert {trajectory.stop_reason for trajectory in trajectories} == {StopReason.ANSWERED}


def test_a_rank_without_live_rows_generates_for_a_dummy() -> None:
    others = iter([True, True, True, False])
    trajectories, generator = collect({11: [ANSWER]}, any_active=lambda active: next(others))
    assert generator.calls == [[(11,)], [(0,)], [(0,)]]
    assert generator.budgets[1:] == [[1], [1]]
    assert len(trajectories[0].segments) == 1
    idle = iter([True, False])
    assert collect({}, any_active=lambda active: next(idle))[0] == []


word_ids = st.lists(st.integers(0, len(WORDS) - 1), min_size=1, max_size=8).map(tuple)
turns = st.one_of(
    st.sampled_from([ANSWER, SEARCH, OTHER_SEARCH, SILENCE]), st.builds(Generation, word_ids, st.none(), st.booleans())
)
limits_strategy = st.builds(
    RolloutLimits,
    max_turns=st.integers(0, 3),
    max_turn_tokens=st.integers(1, 8),
    max_observation_tokens=st.integers(3, 8),
    max_trajectory_tokens=st.integers(1, 30),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(turns, min_size=4, max_size=4), min_size=1, max_size=4), limits_strategy, st.data())
def test_whatever_the_policy_writes_the_invariants_hold(
    scripts: list[list[Generation]], limits: RolloutLimits, data: st.DataObject
) -> None:
    failures = data.draw(st.lists(st.just(SearchUnavailable("down")), max_size=3))
    trajectories, generator = collect(dict(enumerate(scripts)), FakeSearch(failures), limits)
    for row, trajectory in enumerate(trajectories):
        assert [turn.token_ids for turn in trajectory.turns] == generator.sampled[row]
        assert 1 <= len(trajectory.turns) <= limits.max_turns + 1
        assert sum(len(segment.token_ids) for segment in trajectory.segments) <= limits.max_trajectory_tokens
        assert all(len(seen.token_ids) <= limits.max_observation_tokens for seen in trajectory.observations)
        assert not isinstance(trajectory.segments[-1], Observation)
        assert (trajectory.answer is not None) == (trajectory.stop_reason is StopReason.ANSWERED)
