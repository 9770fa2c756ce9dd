"""SOGRPOTrainer on tiny policies: long prompts, options that reach the engine, and what cannot be trained."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer

from sorl_trl import SOGRPOConfig, SOGRPOTrainer, SOPPOTrainer
from tests.agents import agent_policy, build_agent, native_agent, questions
from tests.policies import build_policy
from tests.training import settings
from tests.trajectories import FixedRollout, parity_reward, prompts


@pytest.mark.parametrize("trainer_class", [SOPPOTrainer, GRPOTrainer])
def test_what_exceeds_the_window_is_counted_and_ends_no_run(tmp_path: Path, trainer_class: Any) -> None:
    """The policy has 12 positions. Some questions alone take more, of the others trajectories are cut short."""
    model = agent_policy()
    model.config.max_position_embeddings = 12
    trainer = build_agent(tmp_path, trainer_class=trainer_class, model=model, max_steps=2)
    long_questions = [{"prompt": "where rome " * 10, "golden_answers": ["rome"]}] * 4
    trainer.train_dataset = Dataset.from_list([*questions(4), *long_questions])
    seen: list[Any] = []
    trainer.reward_funcs = [lambda trajectory, **_: seen.extend(trajectory) or [0.5] * len(trajectory)]
    trainer.train()
    overlong = [not trajectory.turns for trajectory in seen]
    assert any(overlong) and not all(overlong)
    assert {len(t.prompt_ids) for t, is_long in zip(seen, overlong, strict=True) if is_long} == {20}
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert all(math.isfinite(log["loss"]) for log in logs)
    assert logs[0]["rollout/stop_reason/context_limit"] >= sum(overlong) / len(overlong)
    if trainer_class is not GRPOTrainer:
        assert logs[0]["trajectories_without_turn"] == sum(overlong) / len(overlong)


def right(completions: Any, gold: Any) -> list[float]:
    return [0.0 for _ in completions]


def test_what_cannot_be_trained_on_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    """Before the first rollout: TRL would stop without a step, or meet a row in it, or in a later evaluation."""
    with pytest.raises(TypeError, match="write `from sorl_trl import SOGRPOConfig`"):
        SOGRPOTrainer(agent_policy(), parity_reward, GRPOConfig(use_cpu=True, bf16=False), prompts())
    with pytest.raises(ValueError, match="`train_dataset` has 8 prompts, but a rollout takes 16"):
        build_agent(tmp_path, num_generations=2, per_device_train_batch_size=8)
    rows, asked = prompts(8), {"held_out": prompts(8).rename_column("prompt", "question")}
    args = SOGRPOConfig(**settings(tmp_path))
    with pytest.raises(ValueError, match=r"`held_out` has the columns \['question'\]"):
        SOGRPOTrainer(build_policy(), parity_reward, args, rows, asked, processing_class=tokenizer)
    with pytest.raises(ValueError, match="`train_dataset` has the columns"):
        SOGRPOTrainer(build_policy(), parity_reward, args, asked["held_out"], processing_class=tokenizer)
    for none in ({"train_dataset": rows.select([])}, {"train_dataset": rows, "eval_dataset": rows.select([])}):
        with pytest.raises(ValueError, match="_dataset` is empty"):
            SOGRPOTrainer(build_policy(), parity_reward, args, processing_class=tokenizer, **none)
    with pytest.raises(ValueError, match=r"'right' needs `gold`, but the columns are \['prompt'"):
        SOGRPOTrainer(build_policy(), right, args, rows, processing_class=tokenizer)


def test_a_scheduler_of_another_optimizer(tmp_path: Path, tokenizer: Any) -> None:
    """Its learning rates would reach no parameter of the policy; those of a OneCycleLR cannot be lowered for good."""
    policy = build_policy()
    own, other = (torch.optim.SGD(policy.parameters(), lr=0.1) for _ in range(2))
    cycle = torch.optim.lr_scheduler.OneCycleLR(own, 0.1, total_steps=10)
    constant = torch.optim.lr_scheduler.ConstantLR(other)

    def build(optimizer: Any, scheduler: Any, target_kl: float) -> None:
        args, given = SOGRPOConfig(**settings(tmp_path), target_kl=target_kl), (optimizer, scheduler)
        SOGRPOTrainer(policy, parity_reward, args, prompts(8), processing_class=tokenizer, optimizers=given)

    for optimizer in (own, None):
        with pytest.raises(ValueError, match="`optimizers` has a ConstantLR of a SGD, but"):
            build(optimizer, constant, 0.0)
    with pytest.raises(ValueError, match=r"OneCycleLR.*`target_kl=0`"):
        build(own, cycle, 0.005)
    build(own, cycle, 0.0)


def test_a_frozen_policy_is_asked_but_not_trained(tmp_path: Path, tokenizer: Any) -> None:
    """As PEFT loads one; a whole run would pass without a gradient."""
    policy, args = build_policy().requires_grad_(False), SOGRPOConfig(**settings(tmp_path))
    rows = prompts(8)
    trainer = SOGRPOTrainer(
        policy, parity_reward, args, rows, rows, processing_class=tokenizer, rollout_func=FixedRollout()
    )
    assert "eval_reward" in trainer.evaluate()
    with pytest.raises(ValueError, match="`is_trainable=True`"):
        trainer.train()


class Recorded(LlamaForCausalLM):
    """A policy that remembers how it was asked to generate."""

    asked: list[Any]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        self.asked.append(kwargs["generation_config"])
        return super().generate(*args, **kwargs)


def recorded_policy() -> Recorded:
    policy = agent_policy()
    policy.__class__ = Recorded
    policy.asked = []
    return policy


GENERATION_OPTIONS: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.01,
    "repetition_penalty": 1.3,
    "cache_implementation": "static",
    "generation_kwargs": {"typical_p": 0.9, "suppress_tokens": [2], "do_sample": False},
}
"""Option -> a value that is not its default."""


@pytest.mark.parametrize("rollout", ["SearchRollout", "native"])
def test_generation_options(tmp_path: Path, rollout: str) -> None:
    policy, wanted = recorded_policy(), dict(GENERATION_OPTIONS)
    if rollout == "SearchRollout":
        trainer = build_agent(tmp_path, model=policy, **GENERATION_OPTIONS)
    else:
        trainer = native_agent(tmp_path, policy, **GENERATION_OPTIONS)
    trainer._generate([row["prompt"] for row in questions(4)])
    wanted |= wanted.pop("generation_kwargs")
    assert policy.asked
    for config in policy.asked:
        assert {name: getattr(config, name) for name in wanted} == wanted
