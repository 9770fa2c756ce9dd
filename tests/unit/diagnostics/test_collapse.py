"""Rules on recorded log entries, and what the guard decides by them, without a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerControl, TrainerState

from sorl_trl.diagnostics.callbacks import CollapseGuard
from sorl_trl.diagnostics.collapse import DEFAULT_RULES, Alarm, CollapseDetector, Rule, fall, level, not_finite


def detect(log_history: Iterable[dict[str, Any]], rules: Iterable[Rule] = DEFAULT_RULES) -> list[Alarm]:
    """All alarms of a recorded run."""
    detector = CollapseDetector(rules)
    return [alarm for entry in log_history for alarm in detector.observe(entry)]


def numbered(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**entry, "step": step} for step, entry in enumerate(entries, 1)]


def healthy(iteration: int) -> dict[str, float | None]:
    """Learns, and varies a little."""
    noise = 0.05 * (iteration % 3)
    return {
        "reward": 0.3 + 0.005 * iteration - noise,
        "trajectories_without_turn": noise,
        "kl_to_old": 0.02 + noise / 2,
        "turns/ratio_max": 2.0 + noise,
        "rollout/searches_per_trajectory": 1.5 + noise,
    }


def run(metric: str, *iterations: Any) -> list[dict[str, Any]]:
    """Two log entries an iteration, of which the first generates; a number is the value in both of them."""
    log_history: list[dict[str, Any]] = []
    for values in iterations:
        first, second = values if isinstance(values, tuple) else (values, values)
        step = len(log_history) + 1
        log_history += [{"reward": 0.0, metric: first, "step": step}, {metric: second, "step": step + 1}]
    return [*log_history, {"reward": 0.0, "step": len(log_history) + 1}]  # completes the last one


def fired(metric: str, condition: Any, *iterations: Any) -> list[int]:
    """The iterations; the alarm of one comes with the first log entry of the next."""
    alarms = detect(run(metric, *iterations), [Rule("rule", {metric: condition}, "go slower")])
    return [(alarm.step - 3) // 2 for alarm in alarms]


HALF = partial(level, threshold=0.5)


@pytest.mark.parametrize(
    ("metric", "condition", "iterations", "alarms"),
    [
        ("kl_to_old", partial(HALF, patience=2), [0.6, 0.4, 0.5, 0.7, 0.8], [3]),  # in a row
        ("kl_to_old", HALF, [1.0, 1.0, 0.0, 1.0, 1.0], [0, 3]),  # again only after it has not held
        ("kl_to_old", HALF, [(0.0, 0.9), (0.0, 1.0)], [1]),  # an iteration's metrics are averaged
        ("turns/ratio_max", HALF, [(0.0, 0.5)], [0]),  # extremes are kept
        ("kl_to_old", partial(HALF, patience=2), [1.0, None, 1.0, None, 1.0, 0.0, 1.0, 1.0], [2, 7]),
        ("searches", partial(fall, share=0.5, minimum=0.3), [0.29, 0.0, 0.3, 0.0], [3]),  # a fall from little is none
        # Means of two: .2, .5, .8, .5, .2. The fourth is above half of .8, the fifth is not.
        ("entropy", partial(fall, share=0.5, minimum=0.3, window=2), [0.0, 0.4, 0.6, 1.0, 0.0, 0.4], [5]),
    ],
)
def test_a_rule_fires_when_its_condition_begins_to_hold(
    metric: str, condition: Any, iterations: list[Any], alarms: list[int]
) -> None:
    assert fired(metric, condition, *iterations) == alarms


def test_all_conditions_of_a_rule_hold_in_the_same_iteration() -> None:
    iterations = [(1, 0), (0, 1), (1, None), (1, 1), (0, 0)]  # the last one completes the one before
    rule = Rule("both", {"entropy": HALF, "grad_norm": HALF}, "go back")
    (alarm,) = detect(numbered([{"reward": 0.0, "entropy": a, "grad_norm": b} for a, b in iterations]), [rule])
    assert alarm.step == len(iterations)
    assert all(metric in alarm.message for metric in rule.conditions)


VALUES = st.one_of(st.none(), st.floats(), st.floats(0.0, 3.0))
METRICS = sorted({metric for rule in DEFAULT_RULES for metric in rule.conditions})
ENTRIES = st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(METRICS, VALUES)), max_size=40)


class TestDefaultRules:
    @given(ENTRIES, st.integers(0, 40))
    def test_alarms_do_not_depend_on_what_comes_later(self, entries: list[dict[str, Any]], count: int) -> None:
        log_history = numbered(entries)
        until_then = detect(log_history[:count])
        assert until_then == [alarm for alarm in detect(log_history) if alarm.step <= count]

    @pytest.mark.parametrize(
        ("name", "values"),
        [
            ("nothing_to_train_on", {"trajectories_without_turn": 1.0, "reward": None}),
            ("high_kl", {"kl_to_old": 30.0}),
            ("harmful_updates", {"reward": 0.26, "kl_to_old": 0.05}),
            ("reward_fall", {"reward": 0.02, "kl_to_old": 0.01}),
        ],
    )
    def test_each_sees_its_collapse(self, name: str, values: dict[str, float | None]) -> None:
        log_history = numbered([healthy(i) if i < 20 else {**healthy(i), **values} for i in range(40)])
        (alarm,) = detect(log_history)
        assert alarm.rule == name
        assert alarm.step > 21


NOT_FINITE = Rule("not_finite", {"grad_norm": not_finite}, "go back", at_once=True)


@pytest.mark.parametrize("norm", [math.nan, math.inf, -1.0])  # the last one is DeepSpeed's
def test_a_gradient_that_is_not_finite_fires_with_its_entry_and_once(norm: float) -> None:
    """No iteration has begun, let alone been completed."""
    norms = [1.0, norm, norm, 1.0, norm]
    assert [alarm.step for alarm in detect(numbered([{"grad_norm": each} for each in norms]))] == [2, 5]


RULES = (Rule("high_kl", {"kl_to_old": partial(level, threshold=0.2)}, "lower the learning rate"),)


class FakeRun:
    """One optimizer step an iteration, with a log entry of each."""

    def __init__(self, is_main: bool = True) -> None:
        self.args: Any = SimpleNamespace(logging_strategy="steps", save_strategy="steps", fp16=False)
        self.state = TrainerState(is_world_process_zero=is_main, logging_steps=1)
        self.control = TrainerControl()

    def train(self, guard: CollapseGuard, *kl: float) -> None:
        """What is not finite is a gradient norm too."""
        guard.on_train_begin(self.args, self.state, self.control)
        for value in kl:
            self.state.global_step += 1
            norm = 1.0 if math.isfinite(value) else value
            step, logs = self.state.global_step, {"reward": 0.0, "grad_norm": norm, "kl_to_old": value}
            self.state.log_history.append({**logs, "step": step})
            guard.on_log(self.args, self.state, self.control, logs=logs)


def test_what_has_not_been_mended_stops_the_resumed_run_too() -> None:
    run, guard = FakeRun(), CollapseGuard("stop", rules=RULES)
    run.train(guard, 1.0, 1.0)
    run.control = TrainerControl()
    run.train(guard, 1.0)
    assert run.control.should_training_stop


class TestBrokenWeights:
    """One entry an iteration."""

    @pytest.mark.parametrize(("kl", "saves"), [([math.inf], False), ([1.0, 0.0], True)])
    def test_a_stop_saves_no_broken_weights(self, kl: list[float], saves: bool) -> None:
        run = FakeRun()
        run.control.should_save = True  # as after `save_steps`
        run.train(CollapseGuard("stop", (*RULES, NOT_FINITE)), *kl)
        assert run.control.should_training_stop
        assert run.control.should_save == saves
