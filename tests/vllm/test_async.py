"""Rollouts ahead of training, with a real server: weights change while turns are under way."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from transformers import TrainerCallback

from sorl_trl import SOGRPOTrainer, SOPPOTrainer
from sorl_trl.rollout.engines.vllm import EngineUnavailable
from tests.agents import Slow, logged, search_index
from tests.vllm.policies import WINDOW, save_policy, vllm_agent, weights_of
from tests.vllm.servers import serving

EXACT = 1e-4


def agent(folder: Path, server: str, trainer_class: Any = SOGRPOTrainer, **overrides: Any) -> Any:
    mode = {"vllm_mode": "server", "vllm_server_base_url": server, "async_staleness": 2, "max_steps": 12}
    return vllm_agent(folder, trainer_class, search=Slow(search_index(folder), 0.1), **{**mode, **overrides})


@pytest.mark.parametrize("trainer_class", [SOGRPOTrainer, SOPPOTrainer])
def test_ages_are_bounded_and_every_rollout_is_trained_on(tmp_path: Path, server: str, trainer_class: Any) -> None:
    alone = {"num_generations": 1, "per_device_train_batch_size": 4, "steps_per_generation": 2}
    trainer = agent(tmp_path, server, trainer_class, **(alone if trainer_class is SOPPOTrainer else {}))
    before = weights_of(trainer)
    trainer.train()
    ages = logged(trainer, "async/age_max")
    assert ages[0] == 0 < max(ages) <= 2
    assert any((before[name] - now).abs().max() > 1e-3 for name, now in weights_of(trainer).items())


@pytest.mark.parametrize("lora", [False, True])
def test_a_policy_that_stands_still_is_the_one_that_sampled(tmp_path: Path, server: str, lora: bool) -> None:
    """The server began with another policy: these weights came through the file, for rollouts of every age."""
    peft_config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0) if lora else None
    trainer = agent(tmp_path, server, learning_rate=0.0, peft_config=peft_config)
    trainer.train()
    ratios = [*logged(trainer, "turns/ratio_min"), *logged(trainer, "turns/ratio_max")]
    assert max(abs(each - 1) for each in ratios) < EXACT


def test_a_server_in_half_precision_has_the_same_weights(tmp_path: Path) -> None:
    with serving(save_policy(tmp_path / "other"), WINDOW, tmp_path / "output.txt", dtype="bfloat16") as served:
        trainer = agent(tmp_path, served.url)
        trainer.train()
    assert logged(trainer, "turns/ratio_max")[0] > 1 + EXACT, "not in half precision"


def test_a_server_that_was_started_anew_is_told(tmp_path: Path, server: str) -> None:
    trainer = agent(tmp_path, server)
    client = trainer.vllm_generation.vllm_client
    trainer.vllm_generation.sync_weights()
    client.version = 7
    with pytest.raises(EngineUnavailable, match="has weights version '1', but was last sent '7'"):
        trainer.vllm_generation.sync_weights()


def test_an_update_that_fails_leaves_no_paused_server(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = agent(tmp_path, server)
    client = trainer.vllm_generation.vllm_client
    with monkeypatch.context() as patch:
        patch.setattr(client, "_start_weight_update", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainer.vllm_generation.sync_weights()
    assert not client._get(f"{server}/is_paused")["is_paused"]


def test_a_server_that_dies_ends_a_run_that_goes_on_with_another(tmp_path: Path, server: str) -> None:
    """While turns are under way: nobody waits for ever, no thread is left, and nothing that was trained is lost."""
    options = {"max_steps": 10, "save_strategy": "steps", "save_steps": 100}
    with serving(save_policy(tmp_path / "other"), WINDOW, tmp_path / "output.txt") as mortal:
        trainer = agent(tmp_path, mortal.url, **options)

        class Kill(TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step == 3:
                    os.killpg(mortal.process.pid, signal.SIGKILL)

        trainer.add_callback(Kill())
        with pytest.raises(EngineUnavailable, match=r"Resume from .*checkpoint") as caught:
            trainer.train()
    step = trainer.state.global_step
    assert 3 < step < 10 and str(caught.value).endswith(f"checkpoint-{step}.")
    assert not [each for each in threading.enumerate() if each.name.startswith("sorl-ahead")]
    (tmp_path / "rest").mkdir()
    rest = agent(tmp_path / "rest", server, **options)
    rest.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert rest.state.global_step == 10
    assert [log["step"] for log in rest.state.log_history if "loss" in log] == list(range(1, 11))
