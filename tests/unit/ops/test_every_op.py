"""What every operation does: it equals the loops of `reference.py`, ignores what is masked, turns half precision into
float32, and takes batches without a turn."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sorl_trl import ops
from sorl_trl.ops import turn_layout

from . import reference
from .batches import GARBAGE, TURN_IDS, assert_blind_to_masked, float64, normal, quick, turn_id_batches

MASK = TURN_IDS >= 0
TURNS = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]])
STATES = torch.tensor([[7, 5, 0], [7, 8, 5], [7, 5, 7], [5, 5, 5]])
STOPPED = torch.tensor([[1, 0, 1, 1, 0], [0, 1, 1, 0, 0], [1] * 5]).bool()
A, B = normal(MASK, 1), normal(MASK, 2)
RATIO = A.exp()
BOTH = [(kind, turn) for kind in ("token", "sequence", "turn") for turn in ("geometric", "arithmetic")][:5]


def penalty(x: Tensor, mask: Tensor, low: float, high: float) -> Tensor:
    return ops.clip_penalty(x, mask, low, high, "unbiased")


BLIND = {
    "turn_returns": (lambda x: ops.turn_returns(x, TURNS, 0.9), TURNS),
    **{f"gae rewards {i}": (lambda x, i=i: ops.token_gae(x, B, MASK, 0.9, 0.8)[i], MASK) for i in (0, 1)},
    **{f"gae values {i}": (lambda x, i=i: ops.token_gae(A, x, MASK, 0.9, 0.8)[i], MASK) for i in (0, 1)},
    "turn_rewards_to_tokens": (lambda x: ops.turn_rewards_to_tokens(x, TURN_IDS), turn_layout(TURN_IDS).turn_mask),
    **{f"group {s}": (lambda x, s=s: ops.group_turn_advantages(x, TURNS, 4, s), TURNS) for s in (True, False)},
    **{f"whiten {s}": (lambda x, s=s: ops.whiten(x, MASK, s), MASK) for s in (True, False)},
    "explained_variance values": (lambda x: ops.explained_variance(x, B, MASK), MASK),
    "explained_variance returns": (lambda x: ops.explained_variance(A, x, MASK), MASK),
    **{f"kl_to_old {k}": (lambda x, k=k: ops.kl_to_old(x, MASK, k), MASK) for k in ops.KL_ESTIMATORS},
    "kl_to_reference": (lambda x: ops.kl_to_reference(x, B, MASK), MASK),
    "gated_kl": (lambda x: penalty(x, MASK, 0.2, 0.2), MASK),
    "clipping_bias": (lambda x: ops.clipping_bias(RATIO, x, STOPPED, MASK), MASK & STOPPED),
    "clipping_bias of ratios": (lambda x: ops.clipping_bias(x, A, STOPPED, MASK), MASK & STOPPED),
    **{f"matched {s}": (lambda x, s=s: ops.matched_advantages(x, STATES, TURNS, 4, s), TURNS) for s in (True, False)},
    "leave_one_out": (lambda x: ops.leave_one_out_advantages(x, TURNS, 4), TURNS),
    **{str(k): (lambda x, k=k: ops.importance_ratio(x, TURN_IDS, *k), MASK) for k in BOTH},
    "aggregate_turns": (lambda x: ops.aggregate_turns(x, TURN_IDS), MASK),
    **{f"masked_mean {d}": (lambda x, d=d: ops.masked_mean(x, MASK, d), MASK) for d in (None, 0, 1)},
    **{f"turn_reduce {r}": (lambda x, r=r: ops.turn_reduce(x, TURN_IDS, r), MASK) for r in ("mean", "sum")},
    "turn_broadcast": (lambda x: ops.turn_broadcast(x, TURN_IDS), turn_layout(TURN_IDS).turn_mask),
}
# Of no gradient.
COUNTS = {
    "clip_fraction": lambda x: ops.clip_fraction(x, MASK, 0.2, 0.2),
    "vespo_weights": lambda x: ops.vespo_weights(x, MASK, torch.ones(len(MASK), 1), (2.0, 3.0), (3.0, 2.0), x.exp()),
}


@pytest.mark.parametrize("name", BLIND)
def test_masked_entries_do_not_enter(name):
    op, mask = BLIND[name]
    assert_blind_to_masked(op, normal(mask), mask)


@pytest.mark.parametrize("name", [name for name in BLIND if name != "turn_broadcast"])  # which computes nothing
def test_half_precision_is_computed_with_in_float32(name):
    op, mask = BLIND[name]
    half = normal(mask).bfloat16()
    torch.testing.assert_close(op(half), op(half.float()), rtol=0, atol=0)
    assert op(half).dtype in (torch.float32, torch.float64)


@pytest.mark.parametrize("name", COUNTS)
def test_masked_entries_are_not_counted(name):
    for garbage in GARBAGE:
        assert torch.equal(COUNTS[name](torch.where(MASK, A, garbage)), COUNTS[name](A))


# Of numbers `x` and turn ids (B, T): the value where there is no turn.
NONE = {
    "gae": (lambda x, ids: ops.token_gae(x, x, ids >= 0, 0.9, 0.9)[0], 0.0),
    "group_turn_advantages": (lambda x, ids: ops.group_turn_advantages(x, ids >= 0, 2), 0.0),
    "turn_std": (lambda x, ids: ops.turn_std(x, ids >= 0, 2), 0.0),
    "matched_advantages": (lambda x, ids: ops.matched_advantages(x, ids, ids >= 0, 2, True), 0.0),
    "gated_kl": (lambda x, ids: penalty(x, ids >= 0, 0.2, 0.2), 0.0),
    "clipping_bias": (lambda x, ids: ops.clipping_bias(x, x, x > 0, ids >= 0), 0.0),
    "aggregate_turns": (ops.aggregate_turns, 0.0),
    "turn_weights": (lambda x, ids: ops.turn_weights(ids), 0.0),
    "turn_ids_from_mask": (lambda x, ids: ops.turn_ids_from_mask(ids >= 0), -1.0),
    "turn_starts": (lambda x, ids: ops.turn_starts(ids), 0.0),
    "turn_broadcast": (lambda x, ids: ops.turn_broadcast(ops.turn_reduce(x, ids), ids), 0.0),
    "masked_mean": (lambda x, ids: ops.masked_mean(x, ids >= 0), 0.0),
    "scaled_clip_range": (lambda x, ids: ops.scaled_clip_range(0.2, ids), 0.2),
    "length_adjusted_kl": (lambda x, ids: ops.length_adjusted_kl(x.sum(1), ids), 0.0),
    **{str(k): (lambda x, ids, k=k: ops.importance_ratio(x, ids, *k), 1.0) for k in BOTH},
}


@pytest.mark.parametrize("name", NONE)
def test_no_turn(name):
    op, value = NONE[name]
    for shape in ((2, 3), (2, 0), (0, 3), (0, 0)):
        found = op(torch.full(shape, 5.0), torch.full(shape, -1)).double()
        torch.testing.assert_close(found, torch.full_like(found, value))


def _rows(*tensors: Tensor) -> Any:
    return zip(*(tensor.tolist() for tensor in tensors), strict=True)


def _groups(seed: int, count: int = 2) -> tuple[list[Tensor], list[list[list[list[float]]]], Tensor]:
    """Two groups of three trajectories with up to four turns: (6, 4) tensors, what loops take of each group, turns."""
    turns = torch.arange(4) < normal(torch.zeros(6, 1), seed + 1).mul(2).abs().round()
    tensors = [normal(torch.zeros(6, 4), seed + 10 * i) for i in range(count)]
    return tensors, [[x[i : i + 3].tolist() for x in (*tensors, turns)] for i in (0, 3)], turns


def masked_mean(x: Tensor, ids: Tensor, seed: int) -> Any:
    expected = [reference.mean(reference.kept(*pair)) for pair in _rows(x, ids >= 0)]
    return ops.masked_mean(x, ids >= 0, dim=1), expected


def turn_reduce(x: Tensor, ids: Tensor, seed: int) -> Any:
    reduction, loop = (("mean", reference.mean), ("sum", sum))[seed % 2]
    return ops.turn_reduce(x, ids, reduction), reference.turn_reduce(x, ids, loop)


def aggregate_turns(x: Tensor, ids: Tensor, seed: int) -> Any:
    return ops.aggregate_turns(x, ids), reference.aggregate_turns(x, ids)


def importance_ratio(x: Tensor, ids: Tensor, seed: int) -> Any:
    level, turn_ratio = BOTH[seed % len(BOTH)]
    average = turn_ratio if level == "turn" else "geometric"
    return ops.importance_ratio(x, ids, level, turn_ratio), reference.importance_ratio(x, ids, level, average)


def scaled_clip_range(x: Tensor, ids: Tensor, seed: int) -> Any:
    return ops.scaled_clip_range(seed / 20, ids), reference.scaled_clip_range(seed / 20, ids)


def length_adjusted_kl(x: Tensor, ids: Tensor, seed: int) -> Any:
    """The root of the KL per token times the KL per turn, which adds up the tokens of a turn."""
    turns = reference.positions_of_turns(ids)
    lengths = [reference.mean([float(len(turn)) for turn in row]) for row in turns]
    kls = x[:, 0].square() if x.size(1) else x.new_zeros(len(x))
    return ops.length_adjusted_kl(kls, ids), [
        math.sqrt(kl * (kl * n)) for kl, n in zip(kls.tolist(), lengths, strict=True)
    ]


def kl_to_old(x: Tensor, ids: Tensor, seed: int) -> Any:
    estimator = ops.KL_ESTIMATORS[seed % 4]
    expected = [
        reference.mean([reference.kl(x, estimator) for x in reference.kept(*pair)]) for pair in _rows(x, ids >= 0)
    ]
    return ops.kl_to_old(x, ids >= 0, estimator), expected


def gated_kl(x: Tensor, ids: Tensor, seed: int) -> Any:
    """With the gate that is SORL's as specified."""
    x, mask = 0.3 * x, ids >= 0
    return penalty(x, mask, 0.2, 0.28), [reference.clip_penalty(*pair, 0.2, 0.28) for pair in _rows(x, mask)]


def gae(x: Tensor, ids: Tensor, seed: int) -> Any:
    values, discounts = normal(ids, seed + 1), (0.0, 0.5, 0.95, 1.0)
    gamma, lam = discounts[seed % 4], discounts[seed // 4 % 4]
    expected = [reference.gae(*row, gamma, lam) for row in _rows(x, values, ids >= 0)]
    return torch.stack(ops.token_gae(x, values, ids >= 0, gamma, lam), 1), expected


def explained_variance(x: Tensor, ids: Tensor, seed: int) -> Any:
    returns, mask = normal(ids, seed + 1), ids >= 0
    expected = reference.explained_variance(x[mask].tolist(), returns[mask].tolist())
    return ops.explained_variance(x, returns, mask), expected


def leave_one_out_advantages(x: Tensor, ids: Tensor, seed: int) -> Any:
    turns = turn_layout(ids).turn_mask
    returns = normal(ids, seed, columns=turns.size(1))
    own = [row[:count] for row, count in _rows(returns, turns.sum(1))]
    expected = [row + [0.0] * (turns.size(1) - len(row)) for row in reference.leave_one_out(own, len(own))]
    return ops.leave_one_out_advantages(returns, turns, len(own)), expected


def group_turn_advantages(x: Tensor, ids: Tensor, seed: int) -> Any:
    (returns,), groups, turns = _groups(seed, 1)
    scale = seed % 2 == 0
    expected = [row for group in groups for row in reference.group_turn_advantages(*group, scale)]
    return ops.group_turn_advantages(returns, turns, 3, scale), expected


def matched_advantages(x: Tensor, ids: Tensor, seed: int) -> Any:
    (returns, numbers), _, turns = _groups(seed)
    labels, scale = (numbers * 1.5).round().long() * (2**61), seed % 5 > 0
    expected = []
    for i in (0, 3):
        values, of_group, mask = (each[i : i + 3].tolist() for each in (returns, labels, turns))
        expected += reference.matched_advantages(values, of_group, mask, scale)
    return ops.matched_advantages(returns, labels, turns, 3, scale), expected


def group_spread(x: Tensor, ids: Tensor, seed: int) -> Any:
    rewards = torch.where(normal(torch.zeros(1, 6), seed)[0] > 1, torch.nan, normal(torch.zeros(1, 6), seed + 1)[0])
    groups = (rewards[:3].tolist(), rewards[3:].tolist())
    return ops.group_spread(rewards, 3), [reference.std([r for r in each if not math.isnan(r)]) for each in groups]


EQUAL = {
    function.__name__: function
    for function in (
        *(masked_mean, turn_reduce, aggregate_turns, importance_ratio, scaled_clip_range, length_adjusted_kl),
        *(kl_to_old, gated_kl, gae, explained_variance, leave_one_out_advantages, group_turn_advantages),
        *(matched_advantages, group_spread),
    )
}
"""Of numbers (B, T), turn ids and a seed: what the operation of this name finds, and what the loops do."""


@pytest.mark.parametrize("name", EQUAL)
@quick
@given(turn_ids=turn_id_batches(), seed=st.integers(0, 99))
def test_equals_the_reference(name, turn_ids, seed):
    found, expected = EQUAL[name](normal(turn_ids, seed), turn_ids, seed)
    expected = expected if isinstance(expected, Tensor) else float64(expected).view(found.shape)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11, equal_nan=True)
