"""What an option does to training, in numbers that can be compared."""

from __future__ import annotations

from typing import Any

import torch

from tests.trajectories import prompts

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
