"""The rule that fires with a log entry itself: what is no number, and what is merely a mean over nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sorl_trl.diagnostics.collapse_detector import CollapseDetector, NotFinite, detect
from tests.unit.diagnostics.log_entries import healthy, numbered

NOT_FINITE = NotFinite("not_finite", "grad_norm", "go back")
STEP = {"loss": 0.1, "grad_norm": 1.0, "turns/per_trajectory": 2.0, "turns/ratio_max": 1.1, "kl_to_old": 0.01}


def faulty(*entries: dict[str, Any]) -> list[tuple[int, str]]:
    """Step and message of each alarm, of entries that differ from a healthy one."""
    alarms = detect(numbered([{**STEP, **entry} for entry in entries]), [NOT_FINITE])
    return [(alarm.step, alarm.message) for alarm in alarms]


class TestNotFinite:
    @pytest.mark.parametrize(
        ("entry", "fault"),
        [
            ({"loss": math.nan}, "`loss` is nan"),
            ({"grad_norm": math.inf}, "`grad_norm` is inf"),
            ({"grad_norm": -1.0}, "`grad_norm` is -1"),  # DeepSpeed's
            ({"turns/ratio_max": math.inf}, "`turns/ratio_max` is inf"),
            ({"turns/ratio_max": None}, "`turns/ratio_max` is NaN"),  # TRL's
            ({"kl_to_old": math.nan}, "`kl_to_old` is nan"),
        ],
    )
    def test_fires_with_the_entry(self, entry: dict[str, Any], fault: str) -> None:
        """No iteration has begun, let alone been completed."""
        assert faulty({}, entry) == [(2, f"not_finite: {fault} in the log entry of step 2: go back.")]

    @pytest.mark.parametrize(
        "entry",
        [
            {"turns/per_trajectory": 0.0, "turns/ratio_max": None, "kl_to_old": None},
            {"loss": -3.0},
            {"entropy": math.nan},
            {"clip_fraction/negative_turn": None},
        ],
    )
    def test_where_there_is_nothing_to_average(self, entry: dict[str, Any]) -> None:
        assert faulty(entry) == []

    def test_says_it_once(self) -> None:
        broken = {"grad_norm": math.nan, "reward": 0.0}
        assert [step for step, _ in faulty(broken, broken, {}, broken)] == [1, 4]

    def test_an_evaluation_between_changes_nothing(self) -> None:
        entries = numbered([{**STEP, "grad_norm": math.nan}, {"eval_loss": 0.1}, {**STEP, "grad_norm": math.nan}])
        assert [alarm.step for alarm in detect(entries, [NOT_FINITE])] == [1]

    def test_a_cooldown_does_not_hide_it(self) -> None:
        detector = CollapseDetector([NOT_FINITE])
        detector.restart(cooldown=9)
        assert len(detector.observe({**STEP, "loss": math.nan, "step": 1})) == 1

    def test_is_watched_for(self) -> None:
        (alarm,) = detect(numbered([healthy(0), {**healthy(1), "grad_norm": math.nan}]))
        assert (alarm.rule.name, alarm.iteration, alarm.step) == ("not_finite", 1, 2)
