"""What the guard decides and refuses, without a run."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainerControl, TrainerState

from sorl_trl.diagnostics import CollapseGuard, Level, NotFinite

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


BROKEN = (NotFinite("not_finite", "grad_norm", "go back"),)


class TestNotFinite:
    """One entry an iteration."""

    @pytest.mark.parametrize(("kl", "saves"), [([math.inf], False), ([1.0, 0.0], True)])
    def test_a_stop_saves_no_broken_weights(self, kl: list[float], saves: bool) -> None:
        run = FakeRun()
        run.control.should_save = True  # as after `save_steps`
        run.train(CollapseGuard("stop", (*RULES, *BROKEN)), *kl)
        assert run.control.should_training_stop
        assert run.control.should_save == saves

    @pytest.mark.parametrize("fp16", [False, True])
    def test_a_gradient_scaler_skips_what_is_no_number(self, fp16: bool) -> None:
        run, guard = FakeRun(), CollapseGuard("warn", rules=BROKEN)
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


def test_a_run_without_log_entries_is_refused() -> None:
    run = FakeRun()
    run.args.logging_strategy = "no"
    with pytest.raises(ValueError, match="`logging_strategy` is 'no'"):
        run.train(CollapseGuard())
