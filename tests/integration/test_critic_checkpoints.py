"""Checkpoints of SOPPOTrainer: a plain policy, its critic beside it, and runs that go on from both."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sorl_trl import SOPPOTrainer, load_critic
from tests.agents import agent_policy, build_agent, questions
from tests.critics import (
    CASES,
    SMALL_ROLLOUTS,
    build_ppo,
    critic_parameters,
    logs,
    lora_config,
    moved,
    policy_parameters,
    trained_briefly,
    weights,
)
from tests.training import saved_policy
from tests.trajectories import FixedRollout, prompts

EVERY_STEP = {"save_strategy": "steps", "save_steps": 1}


@pytest.mark.parametrize("case", CASES)
class TestPolicyCheckpoint:
    def test_it_loads_without_us(self, tmp_path: Path, tokenizer: Any, case: str) -> None:
        trainer = trained_briefly(tmp_path, tokenizer, **CASES[case], **EVERY_STEP)
        trainer.save_model(tmp_path / "saved")
        for folder in ("checkpoint-2", "saved"):
            (file,) = (tmp_path / folder).glob("*model.safetensors")
            assert not any("critic" in name for name in load_file(file))
            if CASES[case].get("lora"):
                base = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
                model: Any = PeftModel.from_pretrained(base, tmp_path / folder)
            else:
                model, info = AutoModelForCausalLM.from_pretrained(tmp_path / folder, output_loading_info=True)
                assert not any(info.values())
            policy = policy_parameters(trainer.model)
            assert dict(model.named_parameters()).keys() == policy.keys()
            assert not moved(weights(dict(model.named_parameters())), policy)

    def test_resumption_is_exact(self, tmp_path: Path, tokenizer: Any, case: str) -> None:
        """Between two updates on one rollout: what the critic said of it must not be asked again."""
        schedule = {"lr_scheduler_type": "linear", "critic_warmup_steps": 1, "num_iterations": 3, "max_steps": 4}
        overrides = {**CASES[case], **schedule}
        whole = trained_briefly(tmp_path / "whole", tokenizer, **overrides, **EVERY_STEP, model=saved_policy(tmp_path))
        rollout = FixedRollout()
        rollout.calls = 1
        rest = build_ppo(
            tmp_path / "rest", tokenizer, **{**SMALL_ROLLOUTS, **overrides}, rollout_func=rollout,
            model=saved_policy(tmp_path),
        )  # fmt: skip
        loaded: list[Any] = []
        rest._issue_warnings_after_load = loaded.append
        rest.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
        assert not any(result.missing_keys or result.unexpected_keys for result in loaded)
        assert not moved(weights(dict(whole.model.named_parameters())), dict(rest.model.named_parameters()))
        # What was logged before comes from the checkpoint.
        for ours, expected in zip(logs(rest)[:4], logs(whole)[:4], strict=True):
            assert ours == expected
        assert rest.state.global_step == 4


@pytest.mark.parametrize("case", ["adapter", "model"])
def test_a_checkpoint_of_another_critic_or_of_none_is_refused(tmp_path: Path, tokenizer: Any, case: str) -> None:
    kind = "head" if case == "model" else "model"
    trained_briefly(tmp_path, tokenizer, **EVERY_STEP, critic=kind, lora=CASES[case].get("lora", False))
    again = build_ppo(tmp_path, tokenizer, **SMALL_ROLLOUTS, **CASES[case], max_steps=4)
    with pytest.raises(ValueError, match=f"of kind '{kind}'"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    shutil.rmtree(tmp_path / "checkpoint-2" / "critic")
    with pytest.raises(ValueError, match=r"There is no critic in .*checkpoint-2"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_best_checkpoint_comes_back_with_its_critic(tmp_path: Path, tokenizer: Any, lora: bool) -> None:
    """Rewards fall, so that the first of three checkpoints is the best; the second is deleted."""
    rewards = iter(range(100, 0, -1))

    def worse_each_time(completion_ids: Any, **_: Any) -> list[float]:
        return [float(next(rewards))] * len(completion_ids)

    trainer = build_ppo(
        tmp_path, tokenizer, **SMALL_ROLLOUTS, lora=lora, max_steps=3, **EVERY_STEP, save_total_limit=2,
        eval_strategy="steps", eval_steps=1, eval_dataset=prompts(2), per_device_eval_batch_size=2,
        num_generations_eval=1, load_best_model_at_end=True, metric_for_best_model="eval_reward",
        greater_is_better=True, reward_funcs=worse_each_time,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-1")
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-3"]
    again = build_ppo(tmp_path, tokenizer, lora=lora, critic_model_name_or_path=str(tmp_path / "checkpoint-1/critic"))
    assert not moved(weights(critic_parameters(again.model)), critic_parameters(trainer.model))
    last = build_ppo(tmp_path, tokenizer, lora=lora, critic_model_name_or_path=str(tmp_path / "checkpoint-3/critic"))
    assert moved(weights(critic_parameters(last.model)), critic_parameters(trainer.model))


@pytest.mark.parametrize("case", CASES)
def test_turn_values_are_the_trainers(tmp_path: Path, case: str) -> None:
    """V(s_k) of collected trajectories, from the critic alone and from the rollout that trained_briefly it."""
    options = {name: value for name, value in CASES[case].items() if name != "lora"}
    agent_policy().save_pretrained(tmp_path / "base")
    trainer = build_agent(
        tmp_path, trainer_class=SOPPOTrainer, num_generations=1, per_device_train_batch_size=2, max_steps=2,
        value_head_learning_rate=1.0, peft_config=lora_config() if CASES[case].get("lora") else None,
        model=str(tmp_path / "base"), **options,
    )  # fmt: skip
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    trajectories: list[Any] = []
    trainer.reward_funcs = [lambda trajectory, **_: trajectories.extend(trajectory) or [0.0] * len(trajectory)]
    trainer.model.train()
    batch = trainer._generate_and_score_completions([dict(row) for row in questions(8)])
    values = load_critic(tmp_path / "saved").turn_values(trajectories)
    assert len({len(row) for row in values}) > 1
    for row, turn_ids, old_values in zip(values, batch["turn_ids"].tolist(), batch["old_values"], strict=True):
        starts = [turn_ids.index(k) for k in range(max(turn_ids) + 1)]
        assert row == pytest.approx(old_values[starts].tolist(), abs=1e-5)
    assert torch.tensor([v for row in values for v in row]).std() > 1e-3
