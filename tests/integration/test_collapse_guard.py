"""Real runs that are driven into collapse, and what each action of the guard does about it."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from sorl_trl.diagnostics import DEFAULT_RULES
from tests.agents import NAMES, DownAfter, agent_policy, agent_tokenizer, search_index, steps_after
from tests.collapses import (
    ALARM,
    ALWAYS,
    JUMP,
    RATE,
    STEPS,
    GRPOThatRemembers,
    PPOThatRemembers,
    assert_same_as_saved,
    build,
    checkpoint,
    guarded,
    logged,
    set_numbers,
)


@pytest.fixture(autouse=True)
def numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    set_numbers(monkeypatch)


@pytest.fixture(scope="module")
def collapsed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run without a guard."""
    trainer = build(tmp_path_factory.mktemp("collapsed"), save_strategy="no")
    trainer.train()
    return trainer


def test_without_a_guard_the_policy_is_lost(collapsed: Any) -> None:
    rewards, entropy = logged(collapsed, "reward"), logged(collapsed, "entropy")
    assert max(rewards.values()) >= 2.0
    assert rewards[29] == 1.0  # the worst there is
    assert entropy[JUMP] > 2.0
    assert entropy[STEPS] < 0.1


class TestWarn:
    def test_says_what_is_wrong_and_changes_nothing(
        self, tmp_path: Path, collapsed: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        trainer, guard = guarded(tmp_path, "warn", save_strategy="no")
        with caplog.at_level(logging.WARNING, logger="sorl_trl.diagnostics"):
            trainer.train()
        assert re.search(rf"high_kl: by step {ALARM} `kl_to_old` is \d\.\d+", caplog.text)
        assert [alarm.step for alarm in guard.alarms] == list(logged(trainer, "guard/alarms"))
        assert guard.alarms[0].step == ALARM
        ours = [{name: log[name] for name in log if name != "guard/alarms"} for log in trainer.state.log_history]
        assert steps_after(0, ours) == steps_after(0, collapsed.state.log_history)


class TestStop:
    def test_stops_and_saves(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        trainer, _ = guarded(tmp_path, "stop", save_steps=100)
        trainer.train()
        assert trainer.state.global_step == ALARM
        assert [path.name for path in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{ALARM}"]
        assert "CollapseGuard stops training: `action` is 'stop'" in caplog.text


class TestRollBack:
    @pytest.mark.parametrize("trainer_class", [GRPOThatRemembers, PPOThatRemembers])
    def test_restores_the_newest_healthy_checkpoint_and_goes_on(
        self, tmp_path: Path, trainer_class: Any, collapsed: Any
    ) -> None:
        overrides = {"critic_learning_rate": 0.05} if trainer_class is PPOThatRemembers else {}
        trainer, guard = guarded(tmp_path, "roll_back", trainer_class, **overrides)
        trainer.train()
        (alarm,) = guard.alarms
        assert alarm.step == ALARM
        # The iteration of the alarm is 4 (steps 17 to 20), and the margin takes off 3 (13 to 16).
        restored = trainer.restored
        assert restored["checkpoint"] == checkpoint(trainer, 12)
        assert restored["step"] == (ALARM, ALARM)
        assert_same_as_saved(restored)

        assert trainer.state.global_step == STEPS
        assert set(logged(trainer, "off_policy_age").values()) == {0, 1, 2, 3}
        assert list(logged(trainer, "reward")) == [1, 5, 9, 13, 17, 21, 22, 25, 29]  # 22 collects anew
        rates = logged(trainer, "learning_rate")
        assert rates[ALARM + 1] == rates[STEPS] == pytest.approx(0.1 * rates[1])
        assert logged(trainer, "entropy")[STEPS] > 2.0
        assert logged(trainer, "reward")[29] > logged(collapsed, "reward")[29]
        after = [kl for step, kl in logged(trainer, "kl_to_old").items() if step > ALARM]
        assert max(after) < 0.2 < max(logged(trainer, "kl_to_old").values())

    def test_stops_without_a_healthy_checkpoint(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        trainer, _ = guarded(tmp_path, "roll_back", GRPOThatRemembers, save_total_limit=1)
        trainer.train()
        assert trainer.state.global_step == ALARM
        assert "no checkpoint is left from more than 1 iterations before an alarm" in caplog.text

    def test_knows_the_checkpoints_of_the_run_that_it_resumes(self, tmp_path: Path) -> None:
        first = build(tmp_path, max_steps=16, callbacks=[])
        first.train()
        trainer, _ = guarded(tmp_path, "roll_back", GRPOThatRemembers)
        trainer.train(resume_from_checkpoint=str(checkpoint(first, 16)))
        assert trainer.restored["checkpoint"] == checkpoint(first, 12)
        assert trainer.state.global_step == STEPS

    def test_knows_what_the_run_has_done_that_it_resumes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The alarms, how often it went back, what no rule has seen, and the rates of the policy and the critic."""
        set_numbers(monkeypatch, MARGIN=0, MAX_INTERVENTIONS=1)
        fields = {"rules": ALWAYS, "callbacks": [], "num_iterations": 2, "save_steps": 2, "critic_learning_rate": 0.5}
        whole, guard = guarded(tmp_path, "roll_back", PPOThatRemembers, **fields)
        whole.train()
        # Iterations begin at 1, 3, 5, 7, and after going back at 8, 9, 11, ...; those of 7 and 8 are not judged.
        assert logged(whole, "guard/alarms") == {7: 1, 15: 1}
        assert logged(whole, "guard/interventions") == {7: 1}
        assert whole.restored["checkpoint"] == checkpoint(whole, 4)
        rates = sorted({group["lr"] for group in whole.optimizer.param_groups})
        assert rates == [pytest.approx(0.1 * RATE), pytest.approx(0.05)]

        resumed, heir = guarded(tmp_path, "roll_back", PPOThatRemembers, **fields)
        resumed.train(resume_from_checkpoint=str(checkpoint(whole, 12)))
        assert steps_after(12, resumed.state.log_history) == steps_after(12, whole.state.log_history)
        assert heir.alarms == guard.alarms
        assert caplog.text.count("stops training: it has gone back 1 times") == 2


class Poison(TrainerCallback):
    """Makes one weight NaN, once: with it, no step is a number any more, and generation raises."""

    def __init__(self, after: int) -> None:
        self.after: int | None = after

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.after:
            next(kwargs["model"].parameters()).data[0, 0] = math.nan
            self.after = None


class TestNotFinite:
    """The weights are NaN before step 18, in the middle of an iteration."""

    @pytest.mark.parametrize("filters", [True, False])
    def test_goes_back_at_once(self, tmp_path: Path, filters: bool) -> None:
        """Whether or not transformers hides the loss; the margin would take it back to step 12."""
        fields = {"rules": DEFAULT_RULES, "logging_nan_inf_filter": filters, "callbacks": [Poison(after=17)]}
        trainer, guard = guarded(tmp_path, "roll_back", GRPOThatRemembers, **fields)
        trainer.train()
        (alarm,) = guard.alarms
        assert (alarm.rule.name, alarm.step) == ("not_finite", 18)
        assert trainer.restored["checkpoint"] == checkpoint(trainer, 16)
        assert_same_as_saved(trainer.restored)
        assert trainer.state.global_step == STEPS
        for metric in ("loss", "grad_norm", "kl_to_old"):
            values = {step: value for step, value in logged(trainer, metric).items() if step != 18}
            assert all(value is not None and math.isfinite(value) for value in values.values()), metric
        assert all(weight.isfinite().all() for weight in trainer.model.parameters())


def searching_policy() -> Any:
    """Sampled greedily, it searches for what it is asked, and never answers."""
    tokenizer, policy = agent_tokenizer(), agent_policy()
    rows = tokenizer([f"where {name} <search> {name} </search>" for name in NAMES[:4]], return_tensors="pt")
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(100):
        loss = policy(input_ids=rows["input_ids"], labels=rows["input_ids"]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy


def test_stops_where_the_search_is_down_for_good(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Batches without a token to train on: no other checkpoint brings the engine back."""
    fields = {"model": searching_policy(), "learning_rate": 1e-6, "top_k": 1, "callbacks": [], "rules": DEFAULT_RULES}
    search = DownAfter(search_index(tmp_path), calls=4)
    trainer, guard = guarded(tmp_path, "roll_back", GRPOThatRemembers, search=search, **fields)
    trainer.train()
    shares = logged(trainer, "trajectories_without_turn")
    assert shares[1] == 0.0
    assert list(shares.values())[-2:] == [1.0, 1.0]
    assert trainer.state.global_step < STEPS
    assert [alarm.rule.name for alarm in guard.alarms] == ["nothing_to_train_on"]
    assert "stops training: nothing can be trained on, and going back does not change that" in caplog.text
