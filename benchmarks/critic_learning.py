"""A critic that learns from rollouts as they come, in the way of SO-PPO or another."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.critic_regression import BATCH, turn_values
from benchmarks.critic_sampling import Sample, joined
from sorl_trl.ops import turn_gae
from sorl_trl.trainers.critic.value_model import ValueModel


@dataclass(frozen=True)
class Variant:
    """A way to train the critic; the defaults are those of the run."""

    title: str
    learning_rate: float = 1e-3
    passes: int = 2
    """Over each rollout, in the policy's updates."""
    extra_passes: int = 0
    """Over each rollout, of the critic alone."""
    replayed: int = 0
    """Further updates after each rollout, on trajectories drawn from all rollouts so far."""
    gae_lambda: float = 1.0
    cross_entropy: bool = False
    """Values are probabilities: the logistic loss instead of the squared one."""
    normalized: float = 0.0
    """PopArt: how fast the mean and the deviation of returns follow; 0 for none."""
    pretrained: int = 0
    """Trajectories of the frozen policy before the run, three epochs of them."""


class Learner:
    """Trains a critic in the way of a variant.

    Args:
        critic: what it starts from.
        variant: how it learns.
    """

    def __init__(self, critic: ValueModel, variant: Variant) -> None:
        self._critic = critic
        self._variant = variant
        self._optimizer = torch.optim.AdamW(critic.parameters(), variant.learning_rate, weight_decay=0.0)
        self._generator = torch.Generator().manual_seed(0)
        self._seen: list[Sample] = []
        self._mean, self._square, self._deviation = 0.0, 1.0, 1.0

    @torch.no_grad()
    def values(self, sample: Sample) -> Tensor:
        """(N, K): V(s_k)."""
        return self._on_scale(turn_values(self._critic, sample))

    def learn(self, rollout: Sample) -> None:
        """From the next rollout of the run."""
        targets = self._targets(rollout)
        if self._variant.normalized:
            self._renormalize(targets[rollout.before_turns >= 0])
        self._seen.append(replace(rollout, targets=targets))
        for _ in range(self._variant.passes + self._variant.extra_passes):
            for rows in torch.randperm(len(rollout), generator=self._generator).split(BATCH):
                self._update(self._seen[-1].rows(rows))
        for part in self._replayed():
            self._update(part)

    def _replayed(self) -> Iterator[Sample]:
        if self._variant.replayed:
            seen = joined(self._seen)
            for _ in range(self._variant.replayed):
                yield seen.rows(torch.randint(len(seen), (BATCH,), generator=self._generator))

    def _targets(self, rollout: Sample) -> Tensor:
        mask = rollout.before_turns >= 0
        last = mask & ~torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)
        rewards = torch.where(last, rollout.returns.unsqueeze(1), 0.0)
        _, targets = turn_gae(rewards, self.values(rollout), mask, 1.0, self._variant.gae_lambda)
        return targets

    def _update(self, part: Sample) -> None:
        values, mask = turn_values(self._critic, part), part.before_turns >= 0
        if self._variant.cross_entropy:
            losses = torch.nn.functional.binary_cross_entropy_with_logits(values, part.targets, reduction="none")
        else:
            losses = 0.5 * (self._on_scale(values) - part.targets).square()
        ((losses * mask).sum(1) / mask.sum(1).clamp(min=1)).mean().backward()
        torch.nn.utils.clip_grad_norm_(self._critic.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _on_scale(self, outputs: Tensor) -> Tensor:
        if self._variant.cross_entropy:
            return outputs.sigmoid()
        return outputs * self._deviation + self._mean if self._variant.normalized else outputs

    @torch.no_grad()
    def _renormalize(self, targets: Tensor) -> None:
        """Let the statistics follow `targets`, the head them, so that no value moves (PopArt, arXiv 1602.07714)."""
        rate = self._variant.normalized if self._seen else 1.0
        mean = self._mean + rate * (float(targets.mean()) - self._mean)
        self._square += rate * (float(targets.square().mean()) - self._square)
        deviation = math.sqrt(max(self._square - mean**2, 1e-4))
        head = self._critic.head
        head.weight.mul_(self._deviation / deviation)
        head.bias.copy_((head.bias * self._deviation + self._mean - mean) / deviation)
        self._mean, self._deviation = mean, deviation
