from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sorl_trl.ops import bounded_log_ratio, importance_ratio, log_importance_ratio, with_own_gradients

from . import reference
from .batches import TURN_IDS, assert_blind_to_masked, normal, quick, turn_id_batches

LEVELS = [("token", "geometric"), ("turn", "geometric"), ("turn", "arithmetic"), ("sequence", "geometric")]
every_level = pytest.mark.parametrize(("level", "turn_ratio"), LEVELS)

# Token ratios 1, 4, ·, 2, · and 8, 2, 2, 2, · over TURN_IDS.
LOG_RATIO = torch.tensor([[1.0, 4.0, 9.0, 2.0, 9.0], [8.0, 2.0, 2.0, 2.0, 9.0], [9.0] * 5]).log()


@pytest.mark.parametrize(
    ("level", "turn_ratio", "expected"),
    [
        ("token", "geometric", [[1, 4, 1, 2, 1], [8, 2, 2, 2, 1], [1] * 5]),
        ("turn", "geometric", [[2, 2, 1, 2, 1], [8, 2, 2, 2, 1], [1] * 5]),
        ("turn", "arithmetic", [[2.5, 2.5, 1, 2, 1], [8, 2, 2, 2, 1], [1] * 5]),
        ("sequence", "geometric", [[2, 2, 1, 2, 1], [64**0.25] * 4 + [1], [1] * 5]),
    ],
)
def test_by_hand(level, turn_ratio, expected):
    ratio = importance_ratio(LOG_RATIO, TURN_IDS, level, turn_ratio)
    torch.testing.assert_close(ratio, torch.tensor(expected, dtype=torch.float32))


@every_level
@quick
@given(turn_ids=turn_id_batches(), seed=st.integers(0, 99))
def test_equals_the_reference(level, turn_ratio, turn_ids, seed):
    log_ratio = normal(turn_ids, seed)
    expected = reference.importance_ratio(log_ratio, turn_ids, level, turn_ratio)
    ratio = importance_ratio(log_ratio, turn_ids, level, turn_ratio)
    torch.testing.assert_close(ratio, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(log_importance_ratio(log_ratio, turn_ids, level, turn_ratio), expected.log())


@quick
@given(turn_ids=turn_id_batches(), seed=st.integers(0, 99))
def test_geometric_is_at_most_arithmetic(turn_ids, seed):
    log_ratio = normal(turn_ids, seed)
    geometric = importance_ratio(log_ratio, turn_ids, "turn", "geometric")
    assert (geometric <= importance_ratio(log_ratio, turn_ids, "turn", "arithmetic") + 1e-12).all()


@every_level
def test_one_ratio_everywhere_is_the_ratio_of_every_unit(level, turn_ratio):
    ratio = importance_ratio(torch.full((3, 5), 0.3), TURN_IDS, level, turn_ratio)
    torch.testing.assert_close(ratio, torch.where(TURN_IDS >= 0, math.exp(0.3), 1.0))


@every_level
def test_blind_to_masked(level, turn_ratio):
    assert_blind_to_masked(lambda x: importance_ratio(x, TURN_IDS, level, turn_ratio), normal(TURN_IDS), TURN_IDS >= 0)


@every_level
def test_gradcheck(level, turn_ratio):
    log_ratio = normal(TURN_IDS).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: importance_ratio(x, TURN_IDS, level, turn_ratio), log_ratio)


@every_level
@pytest.mark.parametrize("turn_ids", [torch.full((2, 3), -1), torch.zeros(2, 0).long(), torch.zeros(0, 3).long()])
def test_no_turn(level, turn_ratio, turn_ids):
    log_ratio = torch.full(turn_ids.shape, 5.0, requires_grad=True)
    ratio = importance_ratio(log_ratio, turn_ids, level, turn_ratio)
    ratio.sum().backward()
    assert torch.equal(ratio, torch.ones(turn_ids.shape))
    assert torch.equal(log_ratio.grad, torch.zeros(turn_ids.shape))


def test_arithmetic_neither_overflows_nor_underflows():
    log_ratio = torch.tensor([[500.0, 0.0, -500.0, -500.0]], requires_grad=True)
    log = log_importance_ratio(log_ratio, torch.tensor([[0, 0, 1, 1]]), "turn", "arithmetic")
    torch.testing.assert_close(log, torch.tensor([[500 - math.log(2)] * 2 + [-500.0] * 2]))
    log.sum().backward()
    torch.testing.assert_close(log_ratio.grad, torch.tensor([[2.0, 0.0, 1.0, 1.0]]))


@every_level
def test_no_gradient_is_nan_on_the_way(level, turn_ratio):
    """Not even of turns a trajectory does not have, so that torch's anomaly detection stays of use."""
    log_ratio = torch.zeros(3, 5, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True):
        importance_ratio(log_ratio, TURN_IDS, level, turn_ratio).sum().backward()


def test_arithmetic_keeps_precision_near_one():
    log_ratio = torch.full((1, 7), 1e-6)
    log = log_importance_ratio(log_ratio, torch.zeros(1, 7, dtype=torch.int64), "turn", "arithmetic")
    torch.testing.assert_close(log, log_ratio, rtol=1e-6, atol=0)


@pytest.mark.parametrize("infinity", [math.inf, -math.inf])
def test_arithmetic_of_infinite_log_ratios_is_not_nan(infinity):
    log = log_importance_ratio(torch.full((1, 2), infinity), torch.zeros(1, 2).long(), "turn", "arithmetic")
    assert log.tolist() == [[infinity] * 2]


def test_each_token_of_a_sequence_may_have_its_own_gradient():
    """By hand: the value is the sequence's, and each turn moves by its own advantage alone."""
    log_ratio = torch.tensor([[0.1, math.nan, 0.3, 0.5]], requires_grad=True)
    turn_ids = torch.tensor([[0, -1, 1, -1]])
    of_sequence = log_importance_ratio(log_ratio, turn_ids, "sequence")
    own = with_own_gradients(of_sequence, log_ratio, turn_ids)
    torch.testing.assert_close(own.detach(), torch.tensor([[0.2, 0.0, 0.2, 0.0]]))
    (own.exp() * torch.tensor([[1.0, 5.0, -2.0, 7.0]])).sum().backward()
    torch.testing.assert_close(log_ratio.grad, torch.tensor([[1.0, 0.0, -2.0, 0.0]]) * math.exp(0.2))


@quick
@given(turn_ids=turn_id_batches(), seed=st.integers(0, 99))
def test_with_one_advantage_own_gradients_are_those_of_the_sequence(turn_ids, seed):
    log_ratio = normal(turn_ids, seed).requires_grad_()
    of_sequence = log_importance_ratio(log_ratio, turn_ids, "sequence")
    own = with_own_gradients(of_sequence, log_ratio, turn_ids)
    kept = turn_ids >= 0
    shared, apart = (torch.autograd.grad(x.exp()[kept].sum(), log_ratio)[0] for x in (of_sequence, own))
    torch.testing.assert_close(apart, shared)


def test_every_token_of_a_turn_gets_the_gradient_of_its_turn():
    log_ratio = torch.zeros(3, 5, requires_grad=True)
    importance_ratio(log_ratio, TURN_IDS, "turn")[0, 0].backward()
    assert log_ratio.grad.tolist() == [[0.5, 0.5, 0, 0, 0], [0] * 5, [0] * 5]


@every_level
def test_half_precision_is_reduced_in_float32(level, turn_ratio):
    log_ratio = torch.full((1, 3000), 0.01, dtype=torch.bfloat16)
    ratio = importance_ratio(log_ratio, torch.zeros(1, 3000, dtype=torch.int64), level, turn_ratio)
    assert ratio.dtype == torch.float32
    torch.testing.assert_close(ratio, log_ratio.float().exp())


def test_errors():
    with pytest.raises(ValueError, match=r"`level` is 'word', but must be one of 'token', 'turn', 'sequence'"):
        importance_ratio(LOG_RATIO, TURN_IDS, "word")
    with pytest.raises(ValueError, match=r"`turn_ratio` is 'harmonic', but must be one of 'geometric', 'arithmetic'"):
        importance_ratio(LOG_RATIO, TURN_IDS, "token", "harmonic")


def test_bounded_log_ratio_by_hand():
    log_ratio = torch.tensor([-math.inf, -95.0, -20.0, -0.5, 0.0, 20.0, 20.1, math.inf], requires_grad=True)
    bounded = bounded_log_ratio(log_ratio)
    bounded.sum().backward()
    assert bounded.tolist() == [-20.0, -20.0, -20.0, -0.5, 0.0, 20.0, 20.0, 20.0]
    assert log_ratio.grad.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]


def test_bounded_log_ratio_hides_no_nan():
    assert bounded_log_ratio(torch.tensor([math.nan])).isnan().all()


def test_bounded_log_ratio_of_half_precision_is_float32():
    assert bounded_log_ratio(torch.tensor([3.0], dtype=torch.bfloat16)).dtype == torch.float32
