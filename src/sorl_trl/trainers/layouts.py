"""Which tokens of a batch a model reads, and where its results belong.

    unfolded  (S, L)  a row for each of S contexts, padded on the right
    packed    (1, N)  contexts end to end, each with positions and attention of its own; no padding
    tree      (1, N)  as packed, but what contexts have in common at their beginning is read once
    rows      (B, W)  TRL's rows, for prompts with images

Layouts differ in nothing but their `Plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sorl_trl.trainers.attention import Segments

LAYOUTS = ("unfolded", "packed", "tree")
"""Each with more elaborate attention than those before it."""
WORTH = 0.9
"""A layout is taken before a simpler one if it has at most this part of the tokens. Ours."""


@dataclass(frozen=True)
class Plan:
    """Which tokens the model reads, and where its M results belong."""

    input_ids: Tensor
    """(S, L) or (1, N)."""
    predictors: Tensor
    """(M,) positions in the flattened `input_ids` whose outputs predict scored tokens. One may predict several."""
    labels: Tensor
    """(1, M) the scored tokens."""
    targets: Tensor
    """(M,) where they stand in the flattened batch; empty beside one position without a label if nothing is scored."""
    attention_mask: Tensor | None = None
    """(S, L); no token reads padding on its right, so only a router loss needs it."""
    position_ids: Tensor | None = None
    """(1, N) each token's place in its context."""
    segments: Segments | None = None

    def predicting(self, found: Tensor) -> Tensor:
        """(S, L, ...) to (1, M, ...): what is found at the positions that predict scored tokens."""
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
    """Lay out a batch of (B, W) token `ids`.

    Tokens of a context need not be adjacent, since a trajectory may leave a context and return to it. The first token
    of a context has nothing that predicts it, so it is not scored.

    Args:
        ids: Token ids.
        mask: 1 at tokens, 0 at padding.
        scored: Bool, the tokens to score.
        contexts: The context of each token, at least 0. None: each row is one.
        layouts: Of which to take the one with the fewest tokens, simpler ones first.
        width: The least length of unfolded rows.
    """
    if layouts[0] == "rows":
        wanted = pad(scored[:, 1:] & mask[:, 1:].bool() & mask[:, :-1].bool(), (1, 0), value=False)
        targets = wanted.flatten().nonzero().squeeze(1)
        return _plan(ids, ids, targets - 1, targets, attention_mask=mask)
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
        layout = other if sizes[other] <= WORTH * sizes[layout] else layout

    if layout == "unfolded":
        row = torch.arange(len(lengths), device=ids.device).repeat_interleave(counts)
        at, shape = row * width + within, (len(lengths), width)
        unfolded = ids.new_zeros(shape).flatten().scatter(0, at, tokens).view(shape)
        filled = mask.new_zeros(shape).flatten().index_fill(0, at, 1).view(shape)
        return _plan(ids, unfolded, at[chosen] - 1, places[chosen], attention_mask=filled)
    if layout == "packed" or tree is None:
        segments = Segments(tuple(lengths), (), pad(ends, (1, 0)).int())
        packed = {"position_ids": within[None], "segments": segments}
        return _plan(ids, tokens[None], chosen - 1, places[chosen], **packed)
    at = torch.tensor(tree.places, device=ids.device)
    first = torch.empty(tree.size, dtype=torch.long, device=ids.device)
    first[at] = torch.arange(len(at), device=ids.device)
    bounds = torch.tensor([0, *tree.lengths], device=ids.device).cumsum(0).int()
    packed = {"position_ids": within[first][None], "segments": Segments(tuple(tree.lengths), tree.before, bounds)}
    return _plan(ids, tokens[first][None], at[chosen - 1], places[chosen], **packed)


def _plan(ids: Tensor, input_ids: Tensor, predictors: Tensor, targets: Tensor, **others: Any) -> Plan:
    if len(targets):
        return Plan(input_ids, predictors, ids.flatten()[targets][None], targets, **others)
    return Plan(input_ids, targets.new_zeros(1), ids.new_full((1, 1), -100), targets, **others)


@dataclass(frozen=True)
class Tree:
    """Texts whose common beginnings are one segment, which the segments after it continue."""

    lengths: list[int]
    before: tuple[tuple[int, ...], ...]
    """Of each segment, the segments that it continues, in order."""
    places: list[int]
    """Where each token of each text stands among the tokens of all segments."""

    @property
    def size(self) -> int:
        return sum(self.lengths)


def shared_beginnings(texts: Sequence[Sequence[int]]) -> Tree:
    """The tree of `texts`, in which each beginning that several have in common occurs once."""
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
