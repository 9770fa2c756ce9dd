"""The layout in which a model reads a batch: which tokens, where results belong, and how packed tokens attend.

    unfolded  (S, L)  a row for each of S contexts, padded on the right
    packed    (1, N)  contexts end to end, each with its own positions and attention; no padding
    tree      (1, N)  as packed, but a prefix that contexts share is read once
    rows      (B, W)  TRL's rows, for prompts with images

Layouts differ only in their `Plan`. Models look attention within segments up by its name, `IN_SEGMENTS`. It behaves
like sdpa, except in a pass that specifies segments. The name is set once and for all, because gradient checkpointing
recomputes layers during backward, with whatever name is set by then.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sorl_trl.rollout.engines.slots.support import IN_SEGMENTS, rope_of_batch

try:
    from torch.nn.attention.varlen import varlen_attn

    _TAKEN = inspect.signature(varlen_attn).parameters.keys()
except ImportError:  # an earlier torch
    _TAKEN = {}.keys()

LAYOUTS = ("unfolded", "packed", "tree")
"""In order of increasingly elaborate attention."""
WORTH = {"packed": 0.95, "tree": 0.85}
"""A layout is preferred to a simpler one if it needs at most this fraction of that one's tokens.

Our choice: on a CPU, a packed token takes as long as a padded one, and a token in a tree 1.16 times as long.
"""
_KINDS = {"full_attention", "sliding_attention"}
_LARGEST_HEAD = 256
"""The largest head dimension for which torch has a segment kernel."""


class Segments(NamedTuple):
    """The segments of a packed row (1, N). A named tuple, because every engine passes those on to the layers."""

    lengths: tuple[int, ...]
    before: tuple[tuple[int, ...], ...]
    """For each segment, the segments that it continues, in order; empty if no segment continues another."""
    bounds: Tensor
    """(S + 1,) int32: where each segment begins, and N."""

    def arguments(self, model: PreTrainedModel) -> dict[str, Any]:
        """The arguments for calling `model`, besides ids and positions.

        Models use a four-dimensional mask as it is, so none of them creates an N x N mask. This one is empty: no layer
        can attend by it (`_check_arrived`).
        """
        if is_flash(model):
            longest = max(self.lengths)
            return {
                "cu_seq_lens_q": self.bounds,
                "cu_seq_lens_k": self.bounds,
                "max_length_q": longest,
                "max_length_k": longest,
            }
        mask = torch.empty((1, 1, 0, 0), dtype=torch.bool, device=self.bounds.device)
        return {"attention_mask": mask, "segments": self}


@dataclass(frozen=True)
class Plan:
    """Which tokens the model reads, and where its M results go."""

    input_ids: Tensor
    """(S, L) or (1, N)."""
    predictors: Tensor
    """(M,) positions in the flattened `input_ids` whose outputs predict scored tokens. One may predict several."""
    labels: Tensor
    """(1, M) the scored tokens."""
    targets: Tensor
    """(M,) their positions in the flattened batch; empty, beside one unlabelled predictor, if nothing is scored."""
    attention_mask: Tensor | None = None
    """(S, L); only a router loss needs it, because no token attends to padding on its right."""
    position_ids: Tensor | None = None
    """(1, N) each token's position in its context."""
    segments: Segments | None = None
    sources: Tensor | None = None
    """Each token's position in the flattened batch, for the flattened `input_ids`; -1 for padding, None in a tree."""

    def predicting(self, found: Tensor) -> Tensor:
        """(S, L, ...) to (1, M, ...): the entries at the positions that predict scored tokens."""
        read = found[:, -self.input_ids.size(1) :]  # prompt tuning puts virtual tokens in front
        return read.flatten(0, 1)[self.predictors].unsqueeze(0)

    def scatter(self, found: Tensor, like: Tensor) -> Tensor:
        """(1, M) to the batch (B, W), with 0 at tokens that are not scored."""
        zeros = found.new_zeros(like.numel())
        if not len(self.targets):  # connected to the model, for engines that wait for each gradient
            return (zeros + 0.0 * found.sum()).view_as(like)
        return zeros.scatter(0, self.targets, found.flatten()).view_as(like)


def plan_of(
    ids: Tensor,
    mask: Tensor,
    scored: Tensor,
    contexts: Tensor | None = None,
    layouts: Sequence[str] = LAYOUTS,
    width: int = 0,
) -> Plan:
    """Choose a layout for a batch of (B, W) token `ids`.

    Tokens of a context need not be adjacent, since a trajectory may leave a context and return to it. Nothing predicts
    the first token of a context, so it is not scored.

    Args:
        ids: Token ids.
        mask: 1 at tokens, 0 at padding.
        scored: Bool, the tokens to score.
        contexts: The context of each token, at least 0. None: each row is one context.
        layouts: The one with the fewest tokens is taken; simpler ones are preferred (`WORTH`).
        width: The minimum length of unfolded rows.
    """
    if layouts[0] == "rows":
        return _plan_of_rows(ids, mask, scored)
    places = mask.flatten().nonzero().squeeze(1)
    texts = torch.arange(len(ids), device=ids.device).unsqueeze(1).expand_as(ids)
    if contexts is not None:
        texts = (texts << 32) + contexts
    texts = texts.flatten()[places]
    if contexts is not None:
        order = texts.argsort(stable=True)
        places, texts = places[order], texts[order]
    counts = torch.unique_consecutive(texts, return_counts=True)[1]
    lengths, ends = counts.tolist(), counts.cumsum(0)
    within = torch.arange(len(places), device=ids.device) - (ends - counts).repeat_interleave(counts)
    tokens, chosen = ids.flatten()[places], (scored.flatten()[places] & (within > 0)).nonzero().squeeze(1)

    tree = shared_beginnings([text.tolist() for text in torch.split(tokens, lengths)]) if "tree" in layouts else None
    width = max(width, *lengths)
    sizes = {"unfolded": len(lengths) * width, "packed": len(places), "tree": tree.size if tree else 0}
    layout = layouts[0]
    for other in layouts[1:]:
        layout = other if sizes[other] <= WORTH[other] * sizes[layout] else layout

    if layout == "unfolded":
        row = torch.arange(len(lengths), device=ids.device).repeat_interleave(counts)
        at, shape = row * width + within, (len(lengths), width)
        unfolded = ids.new_zeros(shape).flatten().scatter(0, at, tokens).view(shape)
        filled = mask.new_zeros(shape).flatten().index_fill(0, at, 1).view(shape)
        sources = places.new_full((unfolded.numel(),), -1).scatter(0, at, places)
        return _plan(ids, unfolded, at[chosen] - 1, places[chosen], attention_mask=filled, sources=sources)
    if layout == "packed" or tree is None:
        segments = Segments(tuple(lengths), (), pad(ends, (1, 0)).int())
        packed = {"position_ids": within[None], "segments": segments, "sources": places}
        return _plan(ids, tokens[None], chosen - 1, places[chosen], **packed)
    at = torch.tensor(tree.places, device=ids.device)
    first = torch.empty(tree.size, dtype=torch.long, device=ids.device)
    first[at] = torch.arange(len(at), device=ids.device)
    bounds = torch.tensor([0, *tree.lengths], device=ids.device).cumsum(0).int()
    packed = {"position_ids": within[first][None], "segments": Segments(tuple(tree.lengths), tree.before, bounds)}
    return _plan(ids, tokens[first][None], at[chosen - 1], places[chosen], **packed)


def _plan_of_rows(ids: Tensor, mask: Tensor, scored: Tensor) -> Plan:
    wanted = pad(scored[:, 1:] & mask[:, 1:].bool() & mask[:, :-1].bool(), (1, 0), value=False)
    targets = wanted.flatten().nonzero().squeeze(1)
    sources = torch.arange(ids.numel(), device=ids.device).where(mask.flatten().bool(), -1)
    return _plan(ids, ids, targets - 1, targets, attention_mask=mask, sources=sources)


def _plan(ids: Tensor, input_ids: Tensor, predictors: Tensor, targets: Tensor, **others: Any) -> Plan:
    if len(targets):
        return Plan(input_ids, predictors, ids.flatten()[targets][None], targets, **others)
    return Plan(input_ids, targets.new_zeros(1), ids.new_full((1, 1), -100), targets, **others)


@dataclass(frozen=True)
class Tree:
    """Texts with shared prefixes merged: each prefix is one segment, continued by the segments after it."""

    lengths: list[int]
    before: tuple[tuple[int, ...], ...]
    """For each segment, the segments that it continues, in order."""
    places: list[int]
    """The position of each token of each text among the tokens of all segments."""

    @property
    def size(self) -> int:
        return sum(self.lengths)


def shared_beginnings(texts: Sequence[Sequence[int]]) -> Tree:
    """The tree of `texts`, in which each shared prefix occurs once."""
    lengths: list[int] = []
    before: list[tuple[int, ...]] = []
    places: list[list[int]] = [[] for _ in texts]
    size = 0
    open_: list[tuple[list[int], int, tuple[int, ...]]] = [([*range(len(texts))], 0, ())]
    while open_:
        group, depth, path = open_.pop()
        by_token: dict[int, list[int]] = {}
        for text in group:
            if len(texts[text]) > depth:
                by_token.setdefault(texts[text][depth], []).append(text)
        for own in by_token.values():
            end = min(len(texts[text]) for text in own)
            for other in own[1:]:
                end = _first_difference(texts[own[0]], texts[other], depth, end)
            for text in own:
                places[text].extend(range(size, size + end - depth))
            open_.append((own, end, (*path, len(lengths))))
            lengths.append(end - depth)
            before.append(path)
            size += end - depth
    return Tree(lengths, tuple(before) if any(before) else (), [place for text in places for place in text])


def _first_difference(one: Sequence[int], other: Sequence[int], start: int, end: int) -> int:
    if one[start:end] == other[start:end]:
        return end
    return next(i for i in range(start, end) if one[i] != other[i])


# -------------------------------------------------------------------------------------------------------------------
# Attention within segments
# -------------------------------------------------------------------------------------------------------------------


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
    """Causal attention within segments, (1, H, N, D) to (1, N, H, D); without `segments`, transformers' own.

    A segment attends to itself and to those that it continues; `sliding_window` counts over both. Keys and values may
    have fewer heads than queries.

    Raises:
        RuntimeError: A layer does not pass on what it attends to.
    """
    _check_arrived(module, attention_mask, segments, sliding_window)
    if segments is None:
        options |= {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window}
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return output, None
    if _has_kernel(query, segments, dropout):
        return _in_one_kernel(query, key, value, segments, scaling, sliding_window), None
    # no slices, because the backward of each allocates zeros for the whole row
    queries, keys, values = (each.split_with_sizes(segments.lengths, dim=2) for each in (query, key, value))
    outputs = []
    for number, own in enumerate(queries):
        path = (*(segments.before[number] if segments.before else ()), number)
        k, v = (
            parts[number] if len(path) == 1 else torch.cat([parts[i] for i in path], 2) for parts in (keys, values)
        )
        outputs.append(_causal(own, k, v, dropout, scaling, sliding_window).transpose(1, 2))
    return torch.cat(outputs, dim=1), None


def _check_arrived(module: Any, mask: Tensor | None, segments: Segments | None, window: int | None) -> None:
    """Raise RuntimeError if packed texts would attend to each other, or beyond the layer's window.

    Segments replace the mask, so a layer that makes its own mask, or expresses its window only by the mask, is wrong.
    """
    name = type(module).__name__
    if (segments is not None) != (mask is not None and not mask.numel()):
        raise RuntimeError(f"{name} does not pass on `segments` and the empty mask of a packed pass together")
    if segments is None:
        return
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None)
    is_sliding = kinds is None or kinds[module.layer_idx] == "sliding_attention"
    wanted = getattr(config, "sliding_window", None) if is_sliding else None
    if window != wanted:
        raise RuntimeError(f"{name} passes on `sliding_window` {window}, but its config has {wanted}")


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
    """Why texts in one row would attend to each other, judging by class and config; None if they would not."""
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
        return "its attention cannot be replaced"
    if config._attn_implementation not in ("sdpa", IN_SEGMENTS) and not is_flash(model):
        return f"its attn_implementation is {config._attn_implementation!r}, not 'sdpa'"
    return None


def attend_in_segments(model: PreTrainedModel) -> None:
    """Make `model` call `segment_attention` from now on, unless it has FlashAttention, which supports segments."""
    if not is_flash(model):
        model.set_attn_implementation(IN_SEGMENTS)


def is_flash(model: PreTrainedModel) -> bool:
    """Whether `model` uses FlashAttention, which gets the segments from transformers."""
    name = model.config.get_text_config(decoder=True)._attn_implementation
    return name is not None and name.startswith("flash_attention")


AttentionInterface.register(IN_SEGMENTS, segment_attention)
AttentionMaskInterface.register(IN_SEGMENTS, sdpa_mask)
