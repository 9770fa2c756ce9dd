"""`SOPPOTrainer` on fixed trajectories, with each kind of critic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from trl.trainer.utils import add_fused_lm_head

from sorl_trl import SOPPOConfig, SOPPOTrainer
from sorl_trl.trainers.critic import (
    CRITIC_ATTRIBUTE,
    AdapterCritic,
    Critic,
    HeadCritic,
    ModelCritic,
    ValueHead,
    add_critic_adapter,
    causal_lm_of,
    is_critic_name,
)
from sorl_trl.trainers.forward import LaidOut
from tests.policies import build_policy
from tests.training import saved_policy, settings
from tests.trajectories import FixedRollout, parity_reward, prompts

CASES: dict[str, dict[str, Any]] = {
    "head": {"critic": "head"},
    "adapter": {"critic": "adapter", "lora": True},
    "model_lora": {"critic": "model", "lora": True},
}
"""Every kind of critic, with the policy that it stands beside."""
ADAPTERS: dict[str, dict[str, Any]] = {
    "attention": {},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "dora": {"use_dora": True},
    "saved_module": {"modules_to_save": ["norm"]},
    "new_tokens": {"trainable_token_indices": [3, 4]},
}
"""Shapes of LoRA whose parameters PEFT names and switches in different ways."""
BATCH_SIZE = 16
"""Trajectories of one rollout."""
STEADY = {"lr_scheduler_type": "constant", "learning_rate": 1e-2}
"""Both learn fast, and from the first step on."""
SMALL_ROLLOUTS = {"per_device_train_batch_size": 2, "steps_per_generation": 2, "num_iterations": 1}
"""Four trajectories and one optimizer step each, four to an epoch."""


def lora_config(**overrides: Any) -> LoraConfig:
    """With weights that are not 0 at first, so that the adapters do something."""
    arguments = {"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "init_lora_weights": False}
    return LoraConfig(**{**arguments, **overrides})


def random_head() -> ValueHead:
    head = ValueHead(16)
    generator = torch.Generator().manual_seed(3)
    for parameter in head.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return head


def policy_with(kind: str, lora: bool = False, **adapter: Any) -> tuple[Any, Critic]:
    """A policy with a random critic of `kind`, as the trainer would have it; `adapter` goes to its `LoraConfig`."""
    model: Any = build_policy()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    if lora or kind == "adapter":
        torch.manual_seed(2)
        model = get_peft_model(model, lora_config(**adapter))
    if kind == "model":
        critic: Critic = ModelCritic(random_head(), build_policy(seed=1).base_model)
    elif kind == "adapter":
        critic = AdapterCritic(random_head(), model, add_critic_adapter(model))
    else:
        critic = HeadCritic(random_head())
    causal_lm_of(model).add_module(CRITIC_ATTRIBUTE, critic)
    return model, critic


def with_values(model: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(B, L - 1) log-probabilities of all tokens but the first, and values beside them."""
    mask = torch.ones_like(ids)
    asked = LaidOut(model, model, ["unfolded"], mask, with_values=True)
    output = asked(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True)
    return output.log_probs[:, 1:], asked.values[0][:, 1:]


def build_ppo(folder: Path, tokenizer: Any, *, lora: bool = False, **overrides: Any) -> SOPPOTrainer:
    """A trainer with 16 trajectories to a rollout; what is no field of the config goes to the trainer."""
    names = ("method", "peft_config", "eval_dataset", "optimizers", "callbacks")
    to_trainer = {name: overrides.pop(name) for name in names if name in overrides}
    if lora:
        to_trainer.setdefault("peft_config", lora_config())
    model = overrides.pop("model", None) or saved_policy(folder)
    reward_funcs = overrides.pop("reward_funcs", parity_reward)
    rollout = overrides.pop("rollout_func", None) or FixedRollout()
    torch.manual_seed(0)  # of the adapter's weights
    return SOPPOTrainer(
        model,
        reward_funcs,
        SOPPOConfig(**settings(folder, **{"num_generations": 1, "gradient_checkpointing": False, **overrides})),
        prompts(BATCH_SIZE),
        processing_class=tokenizer,
        rollout_func=rollout,
        **to_trainer,
    )


def set_head(trainer: SOPPOTrainer) -> None:
    """Random values instead of the zeros of a new critic."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.critic.head.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def rollout_batch(trainer: SOPPOTrainer) -> dict[str, Any]:
    """One rollout of `BATCH_SIZE` trajectories, which need not be split into micro-batches."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer._generate_and_score_completions([dict(row) for row in prompts(BATCH_SIZE)])


def policy_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if not is_critic_name(name)}


def critic_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if is_critic_name(name)}


def weights(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Copies, to compare with later."""
    return {name: p.detach().clone() for name, p in parameters.items()}


def moved(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> set[str]:
    """The names in `after` of those that have changed."""
    return {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}


def logs(trainer: SOPPOTrainer) -> list[dict[str, float]]:
    """The log of each step, less what depends on the clock."""
    timing = ("time", "per_second", "runtime")
    rows = [{k: v for k, v in row.items() if not any(t in k for t in timing)} for row in trainer.state.log_history]
    return [{k: v for k, v in row.items() if not (isinstance(v, float) and math.isnan(v))} for row in rows]


def trained(tmp_path: Path, tokenizer: Any, **overrides: Any) -> tuple[SOPPOTrainer, dict[str, Tensor]]:
    """A trainer after its run, and the weights that it had before."""
    trainer = build_ppo(tmp_path, tokenizer, **{**STEADY, "max_steps": 4, **overrides})
    before = weights(dict(trainer.model.named_parameters()))
    trainer.train()
    return trainer, before


def trainable(parameters: dict[str, Any]) -> set[str]:
    return {name for name, p in parameters.items() if p.requires_grad}


def trained_briefly(folder: Path, tokenizer: Any, **overrides: Any) -> SOPPOTrainer:
    trainer = build_ppo(folder, tokenizer, **{**SMALL_ROLLOUTS, "max_steps": 2, **overrides})
    trainer.train()
    return trainer
