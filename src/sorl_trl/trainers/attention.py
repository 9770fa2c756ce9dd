"""Attention within the segments of a packed row, as a function that transformers' models call by its name.

A model of this name behaves as with sdpa, except for a pass that says where segments lie. Set the name once: gradient
checkpointing computes layers again during backward, with whatever name is set by then.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sorl_trl.rollout.slots.support import IN_SEGMENTS, rope_of_batch

try:
    from torch.nn.attention.varlen import varlen_attn

    _TAKEN = inspect.signature(varlen_attn).parameters.keys()
except ImportError:  # an earlier torch
    _TAKEN = {}.keys()

_KINDS = {"full_attention", "sliding_attention"}
_LARGEST_HEAD = 256
"""The largest head for which torch has a kernel of segments."""


class Segments(NamedTuple):
    """The segments of a packed row (1, N). A named tuple, which every engine hands through to the layers."""

    lengths: tuple[int, ...]
    before: tuple[tuple[int, ...], ...]
    """Of each segment, the segments that it continues, in order; empty if no segment continues another."""
    bounds: Tensor
    """(S + 1,) int32: where each segment begins, and N."""

    def arguments(self, model: PreTrainedModel) -> dict[str, Any]:
        """What to call `model` with, besides ids and positions.

        A mask of four dimensions is used as it is, so that no model makes one of N x N.
        """
        if is_flash(model):
            longest = max(self.lengths)
            return {
                "cu_seq_lens_q": self.bounds,
                "cu_seq_lens_k": self.bounds,
                "max_length_q": longest,
                "max_length_k": longest,
            }
        size = sum(self.lengths)
        mask = torch.ones((), dtype=torch.bool, device=self.bounds.device).expand(1, 1, size, size)
        return {"attention_mask": mask, "segments": self}


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segments: Segments | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within segments, (1, H, N, D) to (1, N, H, D), or transformers' own without `segments`.

    A segment attends to itself and to those before it; `sliding_window` counts over both. Keys and values may have
    fewer heads than queries.
    """
    if segments is None:
        options |= {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window}
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output, None
    if _has_kernel(query, segments, dropout):
        return _in_one_kernel(query, key, value, segments, scaling, sliding_window), None
    # no slices, because the backward of each fills a tensor of the whole row with zeros
    queries, keys, values = (each.split_with_sizes(segments.lengths, dim=2) for each in (query, key, value))
    outputs = []
    for number, own in enumerate(queries):
        path = (*(segments.before[number] if segments.before else ()), number)
        k, v = (
            parts[number] if len(path) == 1 else torch.cat([parts[i] for i in path], 2) for parts in (keys, values)
        )
        outputs.append(_causal(own, k, v, dropout, scaling, sliding_window).transpose(1, 2))
    return torch.cat(outputs, dim=1), None


def _causal(q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float | None, window: int | None) -> Tensor:
    """Attention of the last tokens of a text, (1, H, Q, D), to the whole text, (1, H or fewer, K, D)."""
    length, first = k.size(2), k.size(2) - q.size(2)
    window = length if window is None else min(window, length)
    if not first and window == length:
        return scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=dropout, scale=scale, enable_gqa=k.size(1) != q.size(1)
        )
    own, other = torch.arange(first, length, device=q.device)[:, None], torch.arange(length, device=q.device)
    seen = (other <= own) & (other > own - window)
    if q.is_cuda and k.size(1) != q.size(1):  # there, no fast kernel takes a mask and `enable_gqa`
        k, v = (each.repeat_interleave(q.size(1) // k.size(1), 1) for each in (k, v))
    is_shared = k.size(1) != q.size(1)
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=dropout, scale=scale, enable_gqa=is_shared)


def _kernel_dtype(query: Tensor) -> torch.dtype:
    """The dtype in which attention is computed: autocast leaves rotated queries in float32."""
    is_cast = torch.is_autocast_enabled(query.device.type)
    return torch.get_autocast_dtype(query.device.type) if is_cast else query.dtype


def _has_kernel(query: Tensor, segments: Segments, dropout: float) -> bool:
    is_plain = query.is_cuda and not segments.before and dropout == 0.0 and query.size(-1) <= _LARGEST_HEAD
    return "window_size" in _TAKEN and is_plain and _kernel_dtype(query) in (torch.float16, torch.bfloat16)


def _in_one_kernel(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: Any, window: int | None) -> Tensor:
    # torch 2.11 takes fewer heads of keys as they are
    shared: dict[str, Any] = {"enable_gqa": True} if q.size(1) != k.size(1) and "enable_gqa" in _TAKEN else {}
    q, k, v = (each.transpose(1, 2)[0].to(_kernel_dtype(q)) for each in (q, k, v))
    bounds, longest = segments.bounds, max(segments.lengths)
    sides = (-1 if window is None else window - 1, 0)
    output = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=sides, **shared)
    return cast(Tensor, output)[None]


def why_not_packed(model: PreTrainedModel) -> str | None:
    """Why several texts in one row of `model` would mix, as far as class and config tell; None if they would not."""
    config = model.config.get_text_config(decoder=True)
    if config is not model.config:
        return "it reads more than text"
    if (kind := rope_of_batch(config)) is not None:
        return f"its rotary positions ({kind}) depend on the longest row"
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - _KINDS):
        return f"it has layers of other kinds ({', '.join(others)})"
    if model._is_stateful:
        return "its layers have a state"
    if not model._supports_attention_backend:
        return "its attention cannot be exchanged"
    if config._attn_implementation not in ("sdpa", IN_SEGMENTS) and not is_flash(model):
        return f"its attn_implementation is {config._attn_implementation!r}, and not 'sdpa'"
    return None


def attend_in_segments(model: PreTrainedModel) -> None:
    """Let `model` call `segment_attention` from now on, unless it has FlashAttention, which knows segments itself."""
    if not is_flash(model):
        model.set_attn_implementation(IN_SEGMENTS)


def is_flash(model: PreTrainedModel) -> bool:
    """Whether `model` attends with FlashAttention, which transformers tells where segments lie."""
    name = model.config.get_text_config(decoder=True)._attn_implementation
    return name is not None and name.startswith("flash_attention")


AttentionInterface.register(IN_SEGMENTS, segment_attention)
AttentionMaskInterface.register(IN_SEGMENTS, sdpa_mask)
