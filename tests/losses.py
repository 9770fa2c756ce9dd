"""A batch some way off the policy, and what any loss is compared by: log-probabilities and gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sorl_trl import SOGRPOConfig, SOGRPOTrainer
from tests.training import saved_policy, settings
from tests.trajectories import FixedRollout, parity_reward, prompts

EPSILON = 0.2


def off_policy_batch(tmp_path: Path, tokenizer: Any, **overrides: Any) -> tuple[SOGRPOTrainer, dict[str, Any]]:
    """A trainer and one batch of 8 trajectories whose old and reference log-probabilities lie some way off.

    Unless told otherwise it has what SORL has, with geometric means: turn ratios, a clip range that does not depend on
    the length of a turn, the mean over turns and the penalty.
    """
    arguments = settings(tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=1)
    arguments |= {"importance_sampling_level": "turn", "loss_type": "turn"}
    arguments |= {"clip_normalization": "kl_penalty", "clip_range_scaling": "none"}
    arguments |= {"steps_per_generation": 1, "epsilon": EPSILON, "gradient_checkpointing": False, **overrides}
    policy = saved_policy(tmp_path)
    trainer = SOGRPOTrainer(
        policy, parity_reward, SOGRPOConfig(**arguments), prompts(), processing_class=tokenizer,
        rollout_func=FixedRollout(),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    batch = trainer._generate_and_score_completions([dict(row) for row in prompts(2) for _ in range(4)])
    generator = torch.Generator().manual_seed(7)
    for key in ("old_per_token_logps", "ref_per_token_logps"):
        if key in batch:
            batch[key] = batch[key] + 0.6 * torch.randn(batch[key].shape, generator=generator)
    return trainer, batch


def token_logps(trainer: Any, batch: dict[str, Any]) -> torch.Tensor:
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width = batch["completion_ids"].shape[1]
    logits = trainer.model(input_ids=ids, attention_mask=mask).logits[:, -width - 1 : -1].double()
    return logits.log_softmax(-1).gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)


def gradient(loss: torch.Tensor, trainer: Any) -> torch.Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(trainer.model.parameters()))]).double()
