"""Rules on recorded log entries, and what the guard decides by them, without a run."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainerControl, TrainerState

from sorl_trl.diagnostics import DEFAULT_RULES, CollapseDetector, CollapseGuard, Fall, Level, NotFinite, Rule, detect


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


def fired(rule: Rule, *iterations: Any) -> list[int]:
    """The iterations; the alarm of one comes with the first log entry of the next."""
    return [(alarm.step - 3) // 2 for alarm in detect(run(rule.metric, *iterations), [rule])]


class TestLevel:
    def test_counts_iterations_in_a_row(self) -> None:
        rule = Level("high_kl", "kl_to_old", "go slower", threshold=0.5, patience=2)
        assert fired(rule, 0.6, 0.4, 0.5, 0.7, 0.8) == [3]

    def test_fires_again_only_after_it_has_not_held(self) -> None:
        rule = Level("high_kl", "kl_to_old", "go slower", threshold=0.5)
        assert fired(rule, 1.0, 1.0, 0.0, 1.0, 1.0) == [0, 3]


class TestFall:
    def test_is_from_the_best_moving_average(self) -> None:
        rule = Fall("fall", "reward", "go back", share=0.5, minimum=0.3, window=2)
        # Means of two: .2, .5, .8, .5, .2. The fourth is above half of .8, the fifth is not.
        log_history = [{"reward": reward, "step": i} for i, reward in enumerate([0.0, 0.4, 0.6, 1.0, 0.0, 0.4, 0.0])]
        (alarm,) = detect(log_history, [rule])
        assert alarm.step == 6

    def test_from_little_is_none(self) -> None:
        rule = Fall("fall", "rollout/searches_per_trajectory", "go back", share=0.5, minimum=0.3)
        assert fired(rule, 0.29, 0.0, 0.3, 0.0) == [3]


class TestIteration:
    def test_metrics_are_averaged(self) -> None:
        rule = Level("high_kl", "kl_to_old", "go slower", threshold=0.5)
        assert fired(rule, (0.0, 0.9), (0.0, 1.0)) == [1]

    def test_extremes_are_kept(self) -> None:
        high = Level("high", "turns/ratio_max", "go slower", threshold=9.0)
        assert fired(high, (1.0, 9.0)) == [0]

    def test_is_not_judged_before_it_is_complete(self) -> None:
        rule = Level("high_kl", "kl_to_old", "go slower", threshold=0.5)
        assert detect(run("kl_to_old", 0.0, 1.0)[:-1], [rule]) == []

    def test_without_the_metric_a_rule_waits(self) -> None:
        rule = Level("high_kl", "kl_to_old", "go slower", threshold=0.5, patience=2)
        assert fired(rule, 1.0, None, 1.0, None, 1.0, 0.0, 1.0, 1.0) == [2, 7]


def test_rearmed_rules_fire_again_but_not_on_what_was_seen() -> None:
    detector = CollapseDetector([Level("high_kl", "kl_to_old", "go slower", threshold=0.5)])

    def alarms(value: float | None) -> int:
        return sum(len(detector.observe(entry)) for entry in run("kl_to_old", value))

    assert (alarms(1.0), alarms(1.0)) == (1, 0)
    detector.holding.clear()
    assert (alarms(None), alarms(1.0)) == (0, 1)


VALUES = st.one_of(st.none(), st.floats(), st.floats(0.0, 3.0))
METRICS = sorted({rule.metric for rule in DEFAULT_RULES})
ENTRIES = st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys(METRICS, VALUES)), max_size=40)


class TestDefaultRules:
    @given(ENTRIES, st.integers(0, 40))
    def test_alarms_do_not_depend_on_what_comes_later(self, entries: list[dict[str, Any]], count: int) -> None:
        log_history = numbered(entries)
        until_then = detect(log_history[:count])
        assert until_then == [alarm for alarm in detect(log_history) if alarm.step <= count]

    def test_a_healthy_run_is_left_alone(self) -> None:
        assert detect(numbered([healthy(i) for i in range(100)])) == []

    @pytest.mark.parametrize(
        ("name", "values"),
        [
            ("nothing_to_train_on", {"trajectories_without_turn": 1.0, "reward": None}),
            ("high_kl", {"kl_to_old": 30.0}),
            ("high_turn_ratio", {"turns/ratio_max": 1e4}),
            ("reward_fall", {"reward": 0.02}),
            ("searches_fall", {"rollout/searches_per_trajectory": 0.0}),
        ],
    )
    def test_each_sees_its_collapse(self, name: str, values: dict[str, float | None]) -> None:
        log_history = numbered([healthy(i) if i < 20 else {**healthy(i), **values} for i in range(40)])
        (alarm,) = detect(log_history)
        assert alarm.rule.name == name
        assert alarm.step > 21


NOT_FINITE = NotFinite("not_finite", "grad_norm", "go back")
STEP = {"loss": 0.1, "grad_norm": 1.0}


def faulty(*entries: dict[str, Any]) -> list[tuple[int, str]]:
    """Step and message of each alarm, of entries that differ from a healthy one."""
    alarms = detect(numbered([{**STEP, **entry} for entry in entries]), [NOT_FINITE])
    return [(alarm.step, alarm.message) for alarm in alarms]


class TestNotFinite:
    @pytest.mark.parametrize(
        ("entry", "fault"),
        [
            ({"grad_norm": math.nan}, "`grad_norm` is nan"),
            ({"grad_norm": math.inf}, "`grad_norm` is inf"),
            ({"grad_norm": -1.0}, "`grad_norm` is -1"),  # DeepSpeed's
        ],
    )
    def test_fires_with_the_entry(self, entry: dict[str, Any], fault: str) -> None:
        """No iteration has begun, let alone been completed."""
        assert faulty({}, entry) == [(2, f"not_finite: by step 2 {fault}: go back.")]

    @pytest.mark.parametrize("entry", [{"loss": -3.0}, {"entropy": math.nan}])
    def test_where_there_is_nothing_to_average(self, entry: dict[str, Any]) -> None:
        assert faulty(entry) == []

    def test_says_it_once(self) -> None:
        broken = {"grad_norm": math.nan, "reward": 0.0}
        assert [step for step, _ in faulty(broken, broken, {}, broken)] == [1, 4]

    def test_is_watched_for(self) -> None:
        (alarm,) = detect(numbered([healthy(0), {**healthy(1), "grad_norm": math.nan}]))
        assert (alarm.rule.name, alarm.step) == ("not_finite", 2)


RULES = (Level("high_kl", "kl_to_old", "lower the learning rate", threshold=0.2),)


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

    @pytest.mark.parametrize("fp16", [False, True])
    def test_a_gradient_scaler_skips_what_is_no_number(self, fp16: bool) -> None:
        run, guard = FakeRun(), CollapseGuard("warn", rules=[NOT_FINITE])
        run.args.fp16 = fp16
        run.state.log_history = [{"step": 1, "loss": 0.1, "grad_norm": math.inf}]
        run.state.global_step = 1
        run.train(guard, 0.0)
        assert len(guard.alarms) == (0 if fp16 else 1)


@pytest.mark.parametrize("is_main", [True, False])
def test_one_rank_warns_for_all(is_main: bool, caplog: pytest.LogCaptureFixture) -> None:
    run, guard = FakeRun(is_main), CollapseGuard("stop", rules=RULES)
    run.train(guard, 1.0, 1.0)
    assert len(guard.alarms) == 1
    assert run.control.should_training_stop
    assert ("high_kl" in caplog.text) == is_main


def test_an_evaluation_before_training_is_left_alone() -> None:
    run, guard = FakeRun(), CollapseGuard("stop", rules=RULES)
    run.state.log_history = [{"eval_reward": 0.5, "step": 0}]
    guard.on_log(run.args, run.state, run.control, logs={"eval_reward": 0.5})
    assert not guard.alarms


def test_a_run_without_log_entries_is_refused() -> None:
    run = FakeRun()
    run.args.logging_strategy = "no"
    with pytest.raises(ValueError, match="`logging_strategy` is 'no'"):
        run.train(CollapseGuard())
