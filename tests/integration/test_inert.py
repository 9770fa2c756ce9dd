"""A run in which the method does nothing says so, once, when it starts; and it does nothing, indeed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from sorl_trl import SOGRPOTrainer, SOPPOTrainer
from tests.critics import build_ppo
from tests.training import settings
from tests.trajectories import FixedRollout, parity_reward, prompts

ON_POLICY = {"num_iterations": 1, "gradient_accumulation_steps": 2, "steps_per_generation": 2, "max_steps": 2}
SAID = "Updates per rollout: 1 "


def build(tmp_path: Path, tokenizer: Any, policy: Any, **overrides: Any) -> SOGRPOTrainer:
    config = SOGRPOTrainer.config_class(**settings(tmp_path, **{**ON_POLICY, **overrides}))
    return SOGRPOTrainer(
        policy, parity_reward, config, prompts(), processing_class=tokenizer, rollout_func=FixedRollout()
    )


def test_it_is_said_once_at_the_start(
    tmp_path: Path, tokenizer: Any, policy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = build(tmp_path, tokenizer, policy, clip_normalization="kl_penalty")
    with caplog.at_level(logging.WARNING):
        assert SAID not in caplog.text
        trainer.train()
        trainer.train()
    assert caplog.text.count(SAID) == 1
    for log in (log for log in trainer.state.log_history if "loss" in log):
        assert (log["turns/ratio_min"], log["turns/ratio_max"]) == (1.0, 1.0)
        assert (log["clip_fraction/token"], log["clip_penalty"], log["lr_factor"]) == (0.0, 0.0, 1.0)


def test_a_ppo_run_says_it_too(tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    trainer = build_ppo(tmp_path, tokenizer, **ON_POLICY)
    assert isinstance(trainer, SOPPOTrainer)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert caplog.text.count(SAID) == 1


@pytest.mark.parametrize("overrides", [{"num_iterations": 2}, {"rollout_staleness": 1, "max_steps": 3}])
def test_a_run_in_which_the_method_acts_does_not(
    tmp_path: Path, tokenizer: Any, policy: Any, overrides: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = build(tmp_path, tokenizer, policy, **overrides)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert "Updates per rollout" not in caplog.text
    last = [log for log in trainer.state.log_history if "loss" in log][-1]
    assert last["turns/ratio_min"] < 1.0 < last["turns/ratio_max"]


def test_another_process_than_the_main_one_is_silent(
    tmp_path: Path, tokenizer: Any, policy: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_main_process in (False, True):
        trainer = build(tmp_path, tokenizer, policy, target_kl=0.0)
        monkeypatch.setattr(
            "accelerate.state.PartialState.is_main_process", property(lambda _, it=is_main_process: it)
        )
        trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
        assert (SAID in caplog.text) == is_main_process
