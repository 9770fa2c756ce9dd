"""What an option does to training, in numbers that can be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sorl_trl import SOGRPOTrainer, SOPPOTrainer
from tests.policies import build_moe_policy, build_policy
from tests.training import settings
from tests.trajectories import FixedRollout, parity_reward, prompts

ROWS = 16
"""Trajectories of a rollout."""


def effect(trainer: Any) -> dict[str, Any]:
    """Losses of three passes over a rollout whose policy has moved, and the gradient of the last."""
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    batch = trainer._generate_and_score_completions([dict(row) for row in prompts(ROWS)])
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    losses = []
    for _ in range(3):  # adaptive entropy acts on what the step before has seen
        losses.append(trainer._compute_loss(trainer.model, batch))
    losses[-1].backward()
    gradients = [p.grad.sum().item() for p in trainer.model.parameters() if p.grad is not None]
    return {"losses": [loss.item() for loss in losses], "gradients": gradients}


TRAINERS: dict[str, Any] = {"SO-GRPO": SOGRPOTrainer, "SO-PPO": SOPPOTrainer}


def build_trainer(folder: Path, tokenizer: Any, trainer: str, **overrides: Any) -> Any:
    """A trainer on fixed trajectories; what is no field of the config chooses the model and the rewards."""
    folder.mkdir(exist_ok=True)
    policy: Any = build_moe_policy() if overrides.pop("moe", False) else build_policy()
    policy = policy.to(overrides.pop("dtype", torch.float32))
    policy.save_pretrained(folder / "policy")  # the reference is loaded from there
    policy.config._name_or_path = str(folder / "policy")
    reward_funcs = overrides.pop("reward_funcs", parity_reward)
    size = {"num_generations": 1} if trainer == "SO-PPO" else {}
    return TRAINERS[trainer](
        policy,
        reward_funcs,
        TRAINERS[trainer].config_class(**settings(folder, **{**size, "gradient_checkpointing": False, **overrides})),
        prompts(ROWS),
        processing_class=tokenizer,
        rollout_func=FixedRollout(),
    )
