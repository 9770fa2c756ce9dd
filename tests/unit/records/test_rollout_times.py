from __future__ import annotations

from sorl_trl.diagnostics.rollout_times import PHASES, RolloutTimes
from sorl_trl.records.rollout_times import rollout_times
from sorl_trl.rollout import Phase, Span, Timeline


def test_the_timeline_of_a_rollout_that_was_cut_off() -> None:
    spans = [Span(1, Phase.SEARCH, 1.0, 2.0), Span(0, Phase.SEARCH, 1.5, 3.0)]
    seen = [(1, "search", 1.0, 2.0), (0, "search", 1.5, 3.0)]
    timeline = Timeline(2, 4.0, 3.0, 7, spans, [(0.5, 1.0)], {1: 2.0})
    expected = RolloutTimes(2, 4.0, 3.0, 2.0, 7, seen, [(0.5, 1.0)], [4.0, 2.0])
    assert rollout_times(timeline) == expected


def test_phases_have_one_name() -> None:
    assert [phase.value for phase in Phase] == list(PHASES)
