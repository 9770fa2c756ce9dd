import math

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from sorl_trl.ops import (
    aggregate_turns,
    clipped_surrogate,
    is_clipped,
    is_value_clipped,
    turn_weights,
    value_loss,
    vespo_weights,
)

from .batches import TURN_IDS, float64, quick


class TestClippedSurrogate:
    def test_by_hand(self):
        ratio = torch.tensor([0.5, 1.0, 1.5, 0.5, 1.0, 1.5, 9.0])
        advantages = torch.tensor([2.0, 2.0, 2.0, -2.0, -2.0, -2.0, -2.0])
        surrogate = clipped_surrogate(ratio, advantages, 0.2, 0.3)
        torch.testing.assert_close(surrogate, torch.tensor([1.0, 2.0, 2.6, -1.6, -2.0, -3.0, -18.0]))
        bounded = clipped_surrogate(ratio, advantages, 0.2, 0.3, delta=2.0)
        torch.testing.assert_close(bounded, torch.tensor([1.0, 2.0, 2.6, -1.6, -2.0, -3.0, -4.0]))

    def test_advantages_broadcast_and_half_precision_becomes_float32(self):
        surrogate = clipped_surrogate(torch.ones(2, 3).half(), torch.ones(2, 1).bfloat16(), 0.2, 0.2)
        assert (surrogate.shape, surrogate.dtype) == ((2, 3), torch.float32)


@quick
@given(
    ratio=st.floats(0.01, 9),
    advantage=st.sampled_from([-2.0, -0.5, 0.5, 2.0]),
    delta=st.one_of(st.none(), st.floats(0.9, 6)),
)
def test_clipped_is_where_the_surrogate_has_no_gradient(ratio, advantage, delta):
    edges = [0.8, 1.3, *([] if delta is None else [delta])]
    assume(all(abs(ratio - edge) > 1e-6 for edge in edges))
    w = float64(ratio).requires_grad_()
    clipped_surrogate(w, float64(advantage), 0.2, 0.3, delta).backward()
    assert bool(is_clipped(w.detach(), float64(advantage), 0.2, 0.3, delta)) == (w.grad.item() == 0)


def test_vespo_weighs_a_sequence_by_its_ratio() -> None:
    """φ = e^λ w^k e^{−λw}: 1 where w is 1; w = ½ · 4 = 2, also where the engine has the 4; the last token is none."""
    log_ratio, mask = torch.tensor([[0.0, 0.0, 9.0], [0.5, 4.0, 9.0]]), torch.tensor([[1, 1, 0], [1, 1, 0]])
    log_ratio[1, :2] = log_ratio[1, :2].log()
    signs = torch.tensor([[-1.0], [1.0]])
    expected = torch.tensor([[1.0], [4 * math.exp(-3)]])
    of_engine = torch.tensor([[1.0, 1.0, 7.0], [1.0, 4.0, 7.0]])
    for logs, engine in ((log_ratio, None), (log_ratio.clamp(max=0.0), of_engine)):
        torch.testing.assert_close(vespo_weights(logs, mask, signs, (2.0, 3.0), (3.0, 2.0), engine), expected)
    half = vespo_weights(log_ratio, mask, -signs, (2.0, 3.0), (3.0, 2.0), torch.full((2, 1), 0.5))
    torch.testing.assert_close(half, torch.tensor([[0.25 * math.exp(1.5)], [1.0]]))


def test_aggregate_turns_by_hand():
    x = torch.tensor([[1.0, 3.0, 100.0, 5.0, 100.0], [2.0, 1.0, 2.0, 6.0, 100.0], [100.0] * 5])
    # Turn means 2, 5 and 2, 3; trajectory means 3.5, 2.5 and 0.
    torch.testing.assert_close(aggregate_turns(x, TURN_IDS), torch.tensor(2.0))


def test_turn_weights_by_hand():
    expected = [[3 / 4, 3 / 4, 0, 3 / 2, 0], [2, 4 / 6, 4 / 6, 4 / 6, 0], [0] * 5]
    torch.testing.assert_close(turn_weights(TURN_IDS), torch.tensor(expected))


def test_value_loss_by_hand():
    values, old, returns = (
        torch.tensor([1.0, 1.0, 0.0]),
        torch.tensor([0.0, 0.0, 0.1]),
        torch.tensor([2.0, 0.0, 1.0]),
    )
    # Clipped to 0.2, 0.2 and left at 0: errors 1 or 1.8, 1 or 0.2, 1.
    torch.testing.assert_close(value_loss(values, old, returns, 0.2), torch.tensor([1.62, 0.5, 0.5]))
    torch.testing.assert_close(value_loss(values, old, returns, None), torch.tensor([0.5, 0.5, 0.5]))


def test_is_value_clipped_by_hand():
    # Away from the return, towards it from outside of the range, inside of it, below it, past the return.
    values = torch.tensor([1.0, 1.0, 0.1, -1.0, 0.3])
    returns = torch.tensor([2.0, 0.0, 1.0, -2.0, 0.25])
    clipped = is_value_clipped(values, torch.zeros(5), returns, 0.2)
    assert clipped.tolist() == [True, False, False, True, False]
    assert not is_value_clipped(values, torch.zeros(5), returns, None).any()
