"""What the architecture of SO-PPO's critic reaches by plain regression on trajectories of a frozen policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModel

from benchmarks.critic_sampling import Sample
from sorl_trl.ops import explained_variance
from sorl_trl.trainers.critic.model import ValueHead
from sorl_trl.trainers.critic.value_model import ValueModel

BATCH = 32
"""Trajectories of an update, as in the run."""
LEARNING_RATE = 1e-3
"""As in the run."""


@dataclass(frozen=True)
class Explained:
    """Explained variance of the returns, over all turns and by turn; NaN where all returns are equal."""

    overall: float
    by_turn: list[float]


def new_critic(backbone: Path) -> ValueModel:
    """The critic as SO-PPO begins with it: the policy's backbone and a head of zeros."""
    model = AutoModel.from_pretrained(backbone)
    return ValueModel(model, ValueHead(model.config.hidden_size))


def explained(critic: ValueModel, sample: Sample) -> Explained:
    """How well the critic predicts returns that it has not been trained on."""
    with torch.no_grad():
        values = torch.cat([turn_values(critic, sample.rows(rows)) for rows in torch.arange(len(sample)).split(BATCH)])
    return explained_by(values, sample)


def explained_by(values: Tensor, sample: Sample) -> Explained:
    """The same of ready values (N, K)."""
    mask = sample.before_turns >= 0
    returns = sample.returns.unsqueeze(1).expand(mask.shape)
    by_turn = [explained_variance(values[:, k], returns[:, k], mask[:, k]).item() for k in range(mask.shape[1])]
    return Explained(explained_variance(values, returns, mask).item(), by_turn)


def turn_values(critic: ValueModel, sample: Sample) -> Tensor:
    """(N, K): V(s_k), and the value of some other state where a trajectory has no turn k."""
    longest = int(sample.lengths.max())
    attention_mask = torch.arange(longest).expand(len(sample.lengths), -1) < sample.lengths.unsqueeze(1)
    values: Tensor = critic(sample.input_ids[:, :longest], attention_mask.long())
    return values.gather(1, sample.before_turns.clamp(min=0))


def fit(critic: ValueModel, sample: Sample, epochs: int, seed: int) -> Iterator[int]:
    """Train by ½ (V − R)², averaged over each trajectory's turns; yields after each epoch how many there were."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(critic.parameters(), LEARNING_RATE, weight_decay=0.0)
    for epoch in range(1, epochs + 1):
        for rows in torch.randperm(len(sample), generator=generator).split(BATCH):
            part = sample.rows(rows)
            mask = part.before_turns >= 0
            errors = 0.5 * (turn_values(critic, part) - part.targets).square() * mask
            (errors.sum(1) / mask.sum(1).clamp(min=1)).mean().backward()
            torch.nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        yield epoch
