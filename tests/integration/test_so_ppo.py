"""SOPPOTrainer end to end on tiny policies: learning, metrics, and what inference engines are sent."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from trl.generation.vllm_generation import VLLMGeneration

from sorl_trl import SOPPOTrainer
from tests.agents import agent_policy, build_agent, questions
from tests.critics import (
    CASES,
    build_ppo,
    critic_parameters,
    lora_config,
    moved,
    policy_parameters,
    set_head,
    weights,
)
from tests.policies import build_policy
from tests.trajectories import FixedRollout

# ---------------------------------------------------------------------------------------------------------------------
# Learning
# ---------------------------------------------------------------------------------------------------------------------


class OneTurn(FixedRollout):
    """Every trajectory is one turn of two tokens."""

    def _trajectory(self, index: int) -> tuple[list[int], list[int]]:
        ids, _ = super()._trajectory(index)
        return [*(ids * 2)[:2], 1], [0, 0, 0]


def by_prompt(prompts: list[str], **_: Any) -> list[float]:
    """Known as soon as the prompt is: every second prompt is worth 1."""
    return [float(int(prompt.split()[0][1:]) % 2) for prompt in prompts]


LEARNING = {
    "per_device_train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 1,
    "num_iterations": 1,
    "rollout_func": OneTurn(),
    "reward_funcs": by_prompt,
    "value_clip_range": None,
    "lr_scheduler_type": "constant",
    "learning_rate": 1e-4,
}


def test_the_critic_learns_what_can_be_learnt(tmp_path: Path, tokenizer: Any) -> None:
    rates = {"value_head_learning_rate": 0.3, "critic_learning_rate": 5e-2}
    trainer = build_ppo(tmp_path, tokenizer, **LEARNING, **CASES["adapter"], **rates, max_steps=24)
    trainer.train()
    variances = [log["critic/explained_variance"] for log in trainer.state.log_history[:-1]]
    assert variances[0] == pytest.approx(0.0, abs=1e-6)
    assert sum(variances[-5:]) / 5 > 0.25
    assert trainer.state.log_history[-2]["critic/value_mean"] == pytest.approx(0.5, abs=0.2)


# ---------------------------------------------------------------------------------------------------------------------
# Together with TRL and the collector
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_trains_and_evaluates_with_the_collector(tmp_path: Path, lora: bool) -> None:
    agent_policy().save_pretrained(tmp_path / "base")
    trainer = build_agent(
        tmp_path, trainer_class=SOPPOTrainer, num_generations=1, steps_per_generation=2, num_iterations=1, max_steps=3,
        eval_dataset=questions(4), num_generations_eval=1, beta=0.05, model=str(tmp_path / "base"),
        peft_config=lora_config(init_lora_weights=True) if lora else None,
    )  # fmt: skip
    assert trainer.critic.kind == ("adapter" if lora else "head")
    before = weights(dict(trainer.model.named_parameters()))
    trainer.train()
    for row in trainer.state.log_history[:3]:
        assert math.isfinite(row["loss"]) and row["turns/per_trajectory"] > 1 and "critic/value_mean" in row
    own = critic_parameters(trainer.model)
    assert moved(before, own) == own.keys()
    assert moved(before, policy_parameters(trainer.model))
    metrics = trainer.evaluate()
    assert math.isfinite(metrics["eval_loss"])
    assert {"eval_critic/explained_variance", "eval_critic/value_loss"} <= metrics.keys()


@pytest.mark.parametrize("case", ["head", "adapter", "model_lora"])
def test_vllm_is_sent_the_policy_alone(
    tmp_path: Path, tokenizer: Any, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VLLMGeneration, "_init_vllm", lambda self: None)
    trainer = build_ppo(tmp_path, tokenizer, **CASES[case], use_vllm=True, vllm_mode="colocate")
    set_head(trainer)
    for parameter in critic_parameters(trainer.model).values():
        parameter.data.add_(1.0)  # none of which may get into what is merged
    sent = {name: tensor.clone() for name, tensor in trainer.vllm_generation._iter_named_params()}
    plain = build_policy()
    assert sent.keys() == dict(plain.named_parameters()).keys()
    trainer.model.eval()
    ids = torch.tensor([[4, 9, 5]])
    expected = trainer.model(input_ids=ids).logits
    plain.load_state_dict(sent)
    torch.testing.assert_close(plain(input_ids=ids).logits, expected, rtol=0, atol=1e-5)
