"""Puts rows of one scored batch into the places of rows of another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

_LEFT = ("prompt_ids", "prompt_mask")
"""Fields that are padded on the left. All others begin with the completion."""
_PADDING: Mapping[str, float] = {"tool_mask": 1, "turn_ids": -1, "importance_sampling_ratio": 1.0}
"""Field -> what TRL or we pad it with, where that is neither 0 nor the padding token."""
_TOKENS = ("prompt_ids", "completion_ids")


def merge(first: Mapping[str, Any], second: Mapping[str, Any], takes: Tensor, pad_token_id: int) -> dict[str, Any]:
    """A batch of B trajectories with the rows of `second` where `takes` (B,) is True, else those of `first`.

    What does not have a row per trajectory is that of `first`: `num_items_in_batch` is for the caller to count.

    Args:
        first, second: batches of B trajectories of text, as one trainer makes them.
        takes: (B,) bool.
        pad_token_id: of the tokenizer.
    """
    several = [_with_tool_mask(_on_tokens(batch, _has_tokens(first, second))) for batch in (first, second)]
    merged = {}
    for name, value in several[0].items():
        if value.dim() == 0:
            merged[name] = value
            continue
        padding = pad_token_id if name in _TOKENS else _PADDING.get(name, 0)
        a, b = _same_width(value, several[1][name], padding, on_the_left=name in _LEFT)
        merged[name] = torch.where(takes.view(-1, *[1] * (a.dim() - 1)), b, a)
    return merged


def _has_tokens(*batches: Mapping[str, Any]) -> bool:
    """Whether any of them has advantages per token."""
    return any(batch["advantages"].dim() == 2 for batch in batches)


def _on_tokens(batch: Mapping[str, Any], per_token: bool) -> dict[str, Any]:
    advantages = batch["advantages"]
    if per_token and advantages.dim() == 1:
        advantages = torch.where(batch["turn_ids"] >= 0, advantages.unsqueeze(1), 0.0)
    return {**batch, "advantages": advantages}


def _with_tool_mask(batch: dict[str, Any]) -> dict[str, Any]:
    """TRL has none where a rollout knows no token that is not the policy's."""
    return {"tool_mask": torch.ones_like(batch["completion_mask"]), **batch}


def _same_width(a: Tensor, b: Tensor, padding: float, on_the_left: bool) -> tuple[Tensor, Tensor]:
    if a.dim() == 1:
        return a, b
    width = max(a.size(1), b.size(1))
    sides = [(width - x.size(1), 0) if on_the_left else (0, width - x.size(1)) for x in (a, b)]
    return pad(a, sides[0], value=padding), pad(b, sides[1], value=padding)
