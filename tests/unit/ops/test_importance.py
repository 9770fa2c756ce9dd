from __future__ import annotations

import math

import pytest
import torch

from sorl_trl.ops import (
    bounded_log_ratio,
    effective_sample_size,
    engine_ratio,
    importance_ratio,
    is_outside,
    log_importance_ratio,
    range_of_turns,
    scaled_bound,
    scaled_clip_range,
    turn_layout,
    weight_sums,
    with_own_gradients,
    within,
)

from .batches import TURN_IDS, float64, normal

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
def test_gradcheck(level, turn_ratio):
    """Nor is a gradient NaN on the way, as of turns that a trajectory does not have: anomaly detection finds none."""
    log_ratio = normal(TURN_IDS).requires_grad_()
    with torch.autograd.set_detect_anomaly(True):
        importance_ratio(log_ratio, TURN_IDS, level, turn_ratio).sum().backward()
    assert torch.autograd.gradcheck(lambda x: importance_ratio(x, TURN_IDS, level, turn_ratio), log_ratio)


def test_arithmetic_neither_overflows_nor_underflows():
    log_ratio = torch.tensor([[500.0, 0.0, -500.0, -500.0]], requires_grad=True)
    log = log_importance_ratio(log_ratio, torch.tensor([[0, 0, 1, 1]]), "turn", "arithmetic")
    torch.testing.assert_close(log, torch.tensor([[500 - math.log(2)] * 2 + [-500.0] * 2]))
    log.sum().backward()
    torch.testing.assert_close(log_ratio.grad, torch.tensor([[2.0, 0.0, 1.0, 1.0]]))


@pytest.mark.parametrize(("turn_ratio", "value"), [("geometric", 2.0), ("arithmetic", 2.5)])
def test_each_token_of_a_turn_may_have_its_own_gradient(turn_ratio, value):
    """By hand, token ratios of 1 and 4: the geometric mean passes its value on, the arithmetic each token's ratio."""
    log_ratio = torch.tensor([[0.0, math.inf, math.log(4.0)]], requires_grad=True)
    turn_ids = torch.tensor([[0, -1, 0]])
    of_turn = log_importance_ratio(log_ratio, turn_ids, "turn", turn_ratio)
    own = with_own_gradients(of_turn, log_ratio, turn_ids, turn_ratio)
    torch.testing.assert_close(own.detach().exp(), torch.tensor([[value, 1.0, value]]))
    (own.exp() * torch.tensor([[1.0, 5.0, -3.0]])).sum().backward()
    slopes = [2.0, 2.0] if turn_ratio == "geometric" else [1.0, 4.0]
    torch.testing.assert_close(log_ratio.grad, torch.tensor([[slopes[0], 0.0, -3 * slopes[1]]]))


def test_bounded_log_ratio_by_hand():
    log_ratio = torch.tensor([-math.inf, -95.0, -20.0, -0.5, 0.0, 20.0, 20.1, math.inf], requires_grad=True)
    bounded = bounded_log_ratio(log_ratio)
    bounded.sum().backward()
    assert bounded.tolist() == [-20.0, -20.0, -20.0, -0.5, 0.0, 20.0, 20.0, 20.0]
    assert log_ratio.grad.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert bounded_log_ratio(torch.tensor([math.nan])).isnan().all(), "NaN must stay visible"
    assert bounded_log_ratio(torch.tensor([3.0], dtype=torch.bfloat16)).dtype == torch.float32


# Turns of sixteen and one tokens around an observation; one turn of eighty-one; none.
LONG = torch.tensor([[0] * 16 + [-1, 1] + [-1] * 63, [0] * 81, [-1] * 81])


class TestScaledClipRange:
    def test_by_hand(self):
        """16^(3/4) is 8 and 81^(3/4) is 27; a bound of 1.28 scales like a range of .28."""
        rows = float64([[0.035] * 16 + [0.28] * 65, [0.28 / 27] * 81, [0.28] * 81])
        torch.testing.assert_close(scaled_clip_range(0.28, LONG), rows)
        torch.testing.assert_close(scaled_bound(1.28, turn_layout(LONG)), 1 + rows)

    def test_one_per_turn(self):
        assert range_of_turns(0.2, turn_layout(LONG)) == 0.2
        of_turns = range_of_turns(scaled_clip_range(0.28, LONG), turn_layout(LONG))
        torch.testing.assert_close(of_turns, float64([[0.035, 0.28], [0.28 / 27, 0], [0, 0]]))

    def test_outside_by_hand(self):
        ratio = torch.tensor([0.94, 0.96, 1.04, 1.06, math.nan])
        assert is_outside(ratio, 0.05, 0.05).tolist() == [True, False, False, True, False]
        low, high = torch.tensor([0.1, 0.01, 1, 1, 1]), torch.tensor([1, 1, 0.01, 0.1, 1])
        assert is_outside(ratio, low, high).tolist() == [False, True, True, False, False]


def test_effective_sample_size() -> None:
    """Of weights 1, 1 and 4: 36 / (3 * 18); what is masked, NaN too, does not count; nothing is NaN of nothing."""
    ratio, mask = torch.tensor([[1.0, 1.0, math.nan], [4.0, 9.0, math.inf]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    torch.testing.assert_close(effective_sample_size(weight_sums(ratio, mask)), torch.tensor(2 / 3))
    equal = weight_sums(torch.full((2, 2), 3.0), torch.ones(2, 2))
    torch.testing.assert_close(effective_sample_size(equal), torch.tensor(1.0))
    assert effective_sample_size(weight_sums(ratio, torch.zeros(2, 3))).isnan()


def test_within_by_hand():
    ratio = torch.tensor([0.5, 1.0, 2.0, math.nan])
    assert within(ratio, 0.5, 1.5).tolist() == [True, True, False, False]
    assert within(ratio, None, 1.0).tolist() == [True, True, False, False]
    assert within(ratio, 1.0, None).tolist() == [False, True, True, False]
    assert within(ratio, None, None).tolist() == [True] * 4


class TestEngineRatio:
    MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])
    D = torch.tensor([[0.5, -0.5, 9.0], [1.0, math.nan, 1.0]], dtype=torch.float64)

    def test_by_hand(self):
        ratio = engine_ratio(self.D, self.MASK, "token_truncate", None, 2.0)
        assert ratio.flatten().tolist() == pytest.approx([math.exp(0.5), math.exp(-0.5), 1.0, 2.0, 1.0, 2.0])
        masked = engine_ratio(self.D, self.MASK, "token_mask", 0.8, 2.0)
        assert masked.flatten().tolist() == pytest.approx([math.exp(0.5), 0.0, 1.0, 0.0, 1.0, 0.0])
        assert engine_ratio(self.D, self.MASK, "sequence_truncate").flatten().tolist() == pytest.approx(
            [1.0, math.exp(2.0)]
        )
        assert engine_ratio(self.D, self.MASK, "sequence_mask", None, 3.0).tolist() == [[1.0], [0.0]]
