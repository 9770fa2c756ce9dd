"""What the guard decides and refuses, without a run."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from transformers import TrainerControl, TrainerState

from sorl_trl.diagnostics import CollapseGuard, Level, NotFinite
from sorl_trl.learning_rate import scale_learning_rate
from tests.collapses import set_numbers
from tests.schedulers import OTHER_SCHEDULERS

RULES = (Level("high_kl", "kl_to_old", "lower the learning rate", threshold=0.2),)


def two_groups() -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in (1.0, 0.3)])


@pytest.mark.parametrize("name", OTHER_SCHEDULERS)
def test_other_schedules_are_lowered_too(name: str) -> None:
    def rates(lowered_at: int | None) -> list[list[float]]:
        optimizer = two_groups()
        scheduler, seen = OTHER_SCHEDULERS[name](optimizer), []
        for step in range(8):
            if step == lowered_at:
                scale_learning_rate(optimizer, scheduler, 0.1)
            seen.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            scheduler.step(*[1.0] * (name == "none of its own"))
        return seen

    for step, (free, lowered) in enumerate(zip(rates(None), rates(3), strict=True)):
        assert lowered == pytest.approx([rate * (0.1 if step >= 3 else 1.0) for rate in free])


class FakeRun:
    """One optimizer step an iteration, with a log entry and a checkpoint of each."""

    def __init__(self, folder: Path, is_main: bool = True) -> None:
        self.args: Any = SimpleNamespace(
            output_dir=folder,
            logging_strategy="steps",
            save_strategy="steps",
            save_only_model=False,
            fp16=False,
        )
        self.state = TrainerState(is_world_process_zero=is_main, logging_steps=1)
        self.control = TrainerControl()
        self.optimizer = two_groups()
        self.lr_scheduler: Any = lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)
        self.visited: list[str] = []

    def roll_back(self, checkpoint: Path) -> None:
        self.visited.append(checkpoint.name)

    def train(self, guard: CollapseGuard, *kl: float) -> None:
        """What is not finite is a gradient norm too."""
        handled = {"optimizer": self.optimizer, "lr_scheduler": self.lr_scheduler}
        guard.on_train_begin(self.args, self.state, self.control, **handled)
        for value in kl:
            self.state.global_step += 1
            norm = 1.0 if math.isfinite(value) else value
            step, logs = self.state.global_step, {"reward": 0.0, "grad_norm": norm, "kl_to_old": value}
            self.state.log_history.append({**logs, "step": step})
            guard.on_log(self.args, self.state, self.control, logs=logs, **handled)
            folder = self.args.output_dir / f"checkpoint-{step}"
            folder.mkdir()
            (folder / "trainer_state.json").touch()
            guard.on_save(self.args, self.state, self.control)


def test_what_no_rule_has_seen_is_not_healthy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoints of a cooldown, here of steps 6 to 8, may hold a policy that has collapsed again."""
    set_numbers(monkeypatch, COOLDOWN=2)
    run = FakeRun(tmp_path)
    guard = CollapseGuard("roll_back", run, RULES)
    run.train(guard, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert [alarm.step for alarm in guard.alarms] == [6, 10]
    assert run.visited == ["checkpoint-3", "checkpoint-3"]
    # Once by 0.1 and then, of a checkpoint that does not know of it, by 0.01; this run restores no rates.
    assert [group["lr"] for group in run.optimizer.param_groups] == pytest.approx([0.001, 0.0003])


def test_what_has_not_been_mended_stops_the_resumed_run_too(tmp_path: Path) -> None:
    run, guard = FakeRun(tmp_path), CollapseGuard("stop", rules=RULES)
    run.train(guard, 1.0, 1.0)
    run.control = TrainerControl()
    run.train(guard, 1.0)
    assert run.control.should_training_stop


BROKEN = (NotFinite("not_finite", "grad_norm", "go back"),)


class TestNotFinite:
    """One entry an iteration."""

    def test_goes_back_to_the_newest_checkpoint_whatever_the_margin(self, tmp_path: Path) -> None:
        run = FakeRun(tmp_path)
        run.train(CollapseGuard("roll_back", run, BROKEN), 0.0, 0.0, 0.0, math.inf)
        assert run.visited == ["checkpoint-3"]

    def test_does_not_outweigh_another_alarm(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        set_numbers(monkeypatch)
        run = FakeRun(tmp_path)
        guard = CollapseGuard("roll_back", run, (*RULES, *BROKEN))
        run.train(guard, 0.0, 0.0, 1.0, math.inf)
        assert run.visited == ["checkpoint-1"]

    @pytest.mark.parametrize(("kl", "saves"), [([math.inf], False), ([1.0, 0.0], True)])
    def test_a_stop_saves_no_broken_weights(self, tmp_path: Path, kl: list[float], saves: bool) -> None:
        run = FakeRun(tmp_path)
        run.control.should_save = True  # as after `save_steps`
        run.train(CollapseGuard("stop", run, (*RULES, *BROKEN)), *kl)
        assert run.control.should_training_stop
        assert run.control.should_save == saves

    @pytest.mark.parametrize("fp16", [False, True])
    def test_a_gradient_scaler_skips_what_is_no_number(self, tmp_path: Path, fp16: bool) -> None:
        run, guard = FakeRun(tmp_path), CollapseGuard("warn", rules=BROKEN)
        run.args.fp16 = fp16
        run.state.log_history = [{"step": 1, "loss": 0.1, "grad_norm": math.inf}]
        run.state.global_step = 1
        run.train(guard, 0.0)
        assert len(guard.alarms) == (0 if fp16 else 1)


def test_of_an_earlier_run_only_what_was_resumed_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_numbers(monkeypatch, MARGIN=0)
    for name in ("checkpoint-3", "checkpoint-90", "checkpoint-4-copy", "checkpoint-best", "logs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").touch()
    run = FakeRun(tmp_path)
    run.state.global_step = 5
    run.state.log_history = [{"step": step, "reward": 0.0, "kl_to_old": 0.0} for step in range(1, 6)]
    run.train(CollapseGuard("roll_back", run, RULES), 1.0, 1.0)
    assert run.visited == ["checkpoint-3"]


@pytest.mark.parametrize("is_main", [True, False])
def test_one_rank_warns_for_all(tmp_path: Path, is_main: bool, caplog: pytest.LogCaptureFixture) -> None:
    run, guard = FakeRun(tmp_path, is_main), CollapseGuard("stop", rules=RULES)
    run.train(guard, 1.0, 1.0)
    assert len(guard.alarms) == 1
    assert run.control.should_training_stop
    assert ("high_kl" in caplog.text) == is_main


class TestRefuses:
    @pytest.mark.parametrize("trainer", [None, SimpleNamespace()])
    def test_a_trainer_that_cannot_roll_back(self, trainer: Any) -> None:
        with pytest.raises(ValueError, match=rf"`trainer` is a {type(trainer).__name__}"):
            CollapseGuard("roll_back", trainer)

    @pytest.mark.parametrize(("name", "value"), [("save_strategy", "no"), ("save_only_model", True)])
    def test_a_trainer_without_checkpoints(self, tmp_path: Path, name: str, value: Any) -> None:
        run = FakeRun(tmp_path)
        setattr(run.args, name, value)
        with pytest.raises(ValueError, match=f"`{name}` is {value!r}"):
            CollapseGuard("roll_back", run)

    def test_a_run_without_log_entries(self, tmp_path: Path) -> None:
        run = FakeRun(tmp_path)
        run.args.logging_strategy = "no"
        with pytest.raises(ValueError, match="`logging_strategy` is 'no'"):
            run.train(CollapseGuard())

    def test_a_schedule_that_goes_its_own_way(self, tmp_path: Path) -> None:
        run = FakeRun(tmp_path)
        for scheduler in (lr_scheduler.OneCycleLR(run.optimizer, 1.0, 10), SimpleNamespace()):
            run.lr_scheduler = scheduler
            with pytest.raises(ValueError, match=f"`lr_scheduler` is a {type(scheduler).__name__}, whose learning"):
                run.train(CollapseGuard("roll_back", run))
            run.train(CollapseGuard("warn"))
