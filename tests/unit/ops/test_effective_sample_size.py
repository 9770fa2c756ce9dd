from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sorl_trl.ops import effective_sample_size, weight_sums

from . import reference_methods as reference
from .batches import GARBAGE, TURN_IDS, float64, normal, quick

weight_lists = st.lists(st.floats(0.01, 9), min_size=1, max_size=9)


def size_of(weights: torch.Tensor) -> float:
    return effective_sample_size(weight_sums(weights, torch.ones_like(weights))).item()


def test_by_hand():
    assert size_of(torch.tensor([1.0, 3.0])) == pytest.approx(16 / (2 * 10))
    assert size_of(torch.tensor([2.0, 2.0, 2.0])) == 1.0
    assert size_of(torch.tensor([0.0, 0.0, 0.0, 7.0])) == pytest.approx(1 / 4)


@quick
@given(weight_lists)
def test_equals_the_reference_and_is_a_share(weights):
    size = size_of(float64(weights))
    assert size == pytest.approx(reference.effective_sample_size(weights))
    assert 1 / len(weights) - 1e-9 <= size <= 1 + 1e-9


@quick
@given(weight_lists, weight_lists)
def test_is_formed_of_sums_and_not_a_mean(some, others):
    sums = [weight_sums(float64(part), torch.ones(len(part))) for part in (some, others)]
    together = effective_sample_size(sums[0] + sums[1]).item()
    assert together == pytest.approx(reference.effective_sample_size(some + others))


def test_a_mean_of_parts_would_say_nothing():
    """Each part is as good as can be, and together they are not."""
    parts = [torch.full((4,), 0.1), torch.full((4,), 10.0)]
    assert [size_of(part) for part in parts] == [1.0, 1.0]
    assert size_of(torch.cat(parts)) == pytest.approx(0.51, abs=0.01)


def test_blind_to_masked():
    weights, mask = normal(TURN_IDS).exp(), TURN_IDS >= 0
    for garbage in GARBAGE:
        assert torch.equal(weight_sums(torch.where(mask, weights, garbage), mask), weight_sums(weights, mask))


def test_nothing_to_weigh():
    assert math.isnan(effective_sample_size(weight_sums(torch.ones(2, 3), torch.zeros(2, 3))))
