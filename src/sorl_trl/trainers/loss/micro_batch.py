"""What a micro-batch's loss knows, handed to every term of it and to those who only look on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from sorl_trl.ops import TurnLayout, scaled_bound, scaled_clip_range, turn_ids_from_mask, turn_layout


class ClipRange(NamedTuple):
    """How far a ratio may fall below and rise above 1 before it is clipped, and what bounds it where it is not.

    Floats, or (B, T) tensors with what holds for the unit of each token.
    """

    low: float | Tensor
    high: float | Tensor
    delta: float | Tensor | None = None


class ClipRanges(NamedTuple):
    """The clip range of every ratio that is formed of a micro-batch; `clip_ranges` makes it, and nothing else."""

    tokens: ClipRange
    """Of token ratios: floats, as the trainer has them now."""
    turns: ClipRange
    """Of turn ratios."""
    units: ClipRange
    """Of the ratios of `importance_sampling_level`, which the surrogate clips."""


def clip_ranges(of_token: ClipRange, turns: TurnLayout, level: str, scaling: str) -> ClipRanges:
    """The ranges of tokens, turns and the units of `level`, by `clip_range_scaling`; all `of_token` with "none".

    Raises:
        ValueError: `level` or `scaling` is none of those that `ops.scaled_clip_range` knows.
    """
    of_turns = scaled_to_units(of_token, turns, "turn", scaling)
    of_units = {"token": of_token, "turn": of_turns}.get(level) or scaled_to_units(of_token, turns, level, scaling)
    return ClipRanges(of_token, of_turns, of_units)


def scaled_to_units(of_token: ClipRange, turns: TurnLayout, level: str, scaling: str) -> ClipRange:
    """The range of the units of `level`, given that of a unit of one token, which is a range of floats."""
    if scaling == "none":
        return of_token
    low, high = (scaled_clip_range(epsilon, turns, level, scaling) for epsilon in of_token[:2])
    delta = of_token.delta
    return ClipRange(low, high, None if delta is None else scaled_bound(delta, turns, level, scaling))


@dataclass(frozen=True)
class MicroBatch:
    """B trajectories of at most T completion tokens, once the policy has been asked for its log-probabilities."""

    log_ratio: Tensor
    """(B, T) from old policy to policy, of each token, in nats, bounded, with the policy's gradient."""
    turns: TurnLayout
    """Of its K turns at most."""
    advantages: Tensor
    """(B, T), or (B, 1) where all tokens of a trajectory have the same; not weighted by anything."""
    clip_ranges: ClipRanges
    """Of its ratios."""
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
    has_own_surrogate: bool
    """Whether TRL's loss was given a surrogate of ours."""


class Observer(Protocol):
    """Looks at every micro-batch after its loss is formed, and before the backward pass."""

    def observe(self, batch: MicroBatch) -> None:
        """Look at it; on all ranks together, so that observers may communicate when a step ends."""


ROW_SCALE = "row_scale"
"""Field of a batch from which trajectories were dropped: all rows over those that still count."""
TURN = "trained_turn"
"""Field of a batch whose turns are trained one at a time: the turn that it was made ready for."""
ON_HOST = ("generated_at_step", "turn_counts", ROW_SCALE, TURN)
"""Fields of a batch that stay on the host, where reading them does not wait for the device."""

IMAGE_INPUTS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)
"""Fields of a batch that a pass of the policy reads besides ids and masks, where its prompts have images."""


def loss_mask_of(batch: Mapping[str, Any]) -> Tensor:
    """(B, T) 1 on the tokens that TRL's loss keeps."""
    mask: Tensor = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


def advantages_of(batch: Mapping[str, Any]) -> Tensor:
    """(B, T), or (B, 1) where all tokens of a trajectory have the same."""
    advantages: Tensor = batch["advantages"]
    return advantages.unsqueeze(1) if advantages.dim() == 1 else advantages


def row_scale(batch: Mapping[str, Any]) -> float:
    """By what a mean over the rows of a micro-batch is multiplied, so that dropped ones leave it: 1 without any."""
    return float(batch.get(ROW_SCALE, 1.0))


def generation_step_of(batch: Mapping[str, Any]) -> int | None:
    """How many optimizer steps had been made when its trajectories were sampled; None where it does not say so."""
    step = batch.get("generated_at_step")
    return None if step is None else int(step)


def age_of(batch: Mapping[str, Any], step: int) -> int | None:
    """How many of `step` optimizer steps were made since its trajectories were sampled, where that is known."""
    generated = generation_step_of(batch)
    return None if generated is None else step - generated


def turns_of(batch: Mapping[str, Any]) -> TurnLayout:
    """Its turns: those that it says, else the runs of its model tokens."""
    turn_ids = batch.get("turn_ids")
    return turn_layout(turn_ids_from_mask(loss_mask_of(batch)) if turn_ids is None else turn_ids, most_turns(batch))


def most_turns(batch: Mapping[str, Any]) -> int | None:
    """K, the turns of its trajectory that has most, where it says how many each has."""
    counts = batch.get("turn_counts")
    return None if counts is None or not counts.numel() else int(counts.max())
