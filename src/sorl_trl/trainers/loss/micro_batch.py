"""What a micro-batch's loss knows, handed to every term of it and to those who only look on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from sorl_trl.ops import TurnLayout


class ClipRange(NamedTuple):
    """How far a ratio may fall below and rise above 1 before it is clipped, and what bounds it where it is not."""

    low: float
    high: float
    delta: float | None = None


@dataclass(frozen=True)
class MicroBatch:
    """B trajectories of at most T completion tokens, once the policy has been asked for its log-probabilities."""

    log_ratio: Tensor
    """(B, T) from old policy to policy, of each token, in nats, bounded, with the policy's gradient."""
    turns: TurnLayout
    """Of its K turns at most."""
    advantages: Tensor
    """(B, T), or (B, 1) where all tokens of a trajectory have the same; not weighted by anything."""
    clip_range: ClipRange
    """Of the ratios, as the trainer has it now."""
    inputs: Mapping[str, Any]
    """The batch as the rollout and the trainer made it, before anything is substituted for TRL's loss."""
    is_training: bool
    """Whether the policy is trained on it, rather than evaluated."""
    step: int
    """The optimizer step that it is part of, from 1."""
    age: int | None
    """How many optimizer steps were made since its trajectories were sampled; None in evaluation, and if unknown."""
    ends_step: bool
    """Whether the optimizer steps after it; always True in evaluation, where each micro-batch stands alone."""


class Observer(Protocol):
    """Looks at every micro-batch after its loss is formed, and before the backward pass."""

    def observe(self, batch: MicroBatch) -> None:
        """Look at it; on all ranks together, so that observers may communicate when a step ends."""


ON_HOST = ("generated_at_step", "turn_counts")
"""Fields of a batch that stay on the host, where reading them does not wait for the device."""


def loss_mask_of(batch: Mapping[str, Any]) -> Tensor:
    """(B, T) 1 on the tokens that TRL's loss keeps."""
    mask: Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


def generation_step_of(batch: Mapping[str, Any]) -> int | None:
    """How many optimizer steps had been made when its trajectories were sampled; None where it does not say so."""
    step = batch.get("generated_at_step")
    return None if step is None else int(step)


def age_of(batch: Mapping[str, Any], step: int) -> int | None:
    """How many of `step` optimizer steps were made since its trajectories were sampled, where that is known."""
    generated = generation_step_of(batch)
    return None if generated is None else step - generated


def most_turns(batch: Mapping[str, Any]) -> int | None:
    """K, the turns of its trajectory that has most, where it says how many each has."""
    counts = batch.get("turn_counts")
    return None if counts is None or not counts.numel() else int(counts.max())
