from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sorl_trl.ops import (
    CLIP_RANGE_SCALINGS,
    IMPORTANCE_SAMPLING_LEVELS,
    clip_fraction,
    clip_penalty,
    clipped_surrogate,
    importance_ratio,
    is_clipped,
    is_outside,
    range_of_turns,
    scaled_clip_range,
    turn_clip_fraction,
    turn_layout,
)
from sorl_trl.ops.importance import LONGEST, _widest, unit_lengths

from . import reference
from .batches import GARBAGE, TURN_IDS, float64, normal, quick, turn_id_batches

POWERS = {"none": 0.0, "sqrt_length": 0.5, "length": 1.0}
LEVELS = st.sampled_from(IMPORTANCE_SAMPLING_LEVELS)
SCALINGS = st.sampled_from(CLIP_RANGE_SCALINGS)
# Turns of four and one tokens around an observation; one turn of nine; none.
LONG = torch.tensor([[0, 0, 0, 0, -1, 1, -1, -1, -1], [0] * 9, [-1] * 9])


class TestUnitLengths:
    def test_by_hand(self):
        assert unit_lengths(LONG, "token").tolist() == [[1] * 9] * 3
        assert unit_lengths(LONG, "turn").tolist() == [[4, 4, 4, 4, 1, 1, 1, 1, 1], [9] * 9, [1] * 9]
        assert unit_lengths(LONG, "sequence").tolist() == [[5, 5, 5, 5, 1, 5, 1, 1, 1], [9] * 9, [1] * 9]

    @pytest.mark.parametrize("level", IMPORTANCE_SAMPLING_LEVELS)
    @pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0, 0)])
    def test_empty(self, level, shape):
        lengths = unit_lengths(torch.zeros(shape, dtype=torch.int64), level)
        assert (lengths.shape, lengths.dtype) == (shape, torch.int64)

    def test_errors(self):
        with pytest.raises(ValueError, match="`level` is 'word', but must be one of 'token', 'turn', 'sequence'"):
            unit_lengths(LONG, "word")


def of_one_turn(epsilon, tokens, scaling):
    return scaled_clip_range(epsilon, torch.zeros(1, tokens, dtype=torch.int64), "turn", scaling)[0, 0].item()


class TestScaledClipRange:
    def test_by_hand(self):
        expected = {
            "none": [[0.2] * 9] * 3,
            "sqrt_length": [[0.1] * 4 + [0.2] * 5, [0.2 / 3] * 9, [0.2] * 9],
            "length": [[0.05] * 4 + [0.2] * 5, [0.2 / 9] * 9, [0.2] * 9],
        }
        for scaling, rows in expected.items():
            torch.testing.assert_close(scaled_clip_range(0.2, LONG, "turn", scaling), float64(rows))
        of_sequence = scaled_clip_range(0.2, LONG, "sequence", "length")[0]
        torch.testing.assert_close(of_sequence, float64([0.04] * 4 + [0.2, 0.04] + [0.2] * 3))

    @quick
    @given(turn_ids=turn_id_batches(), level=LEVELS, scaling=SCALINGS, epsilon=st.floats(0, 5))
    def test_equals_the_reference(self, turn_ids, level, scaling, epsilon):
        expected = reference.scaled_clip_range(epsilon, turn_ids, level, POWERS[scaling])
        torch.testing.assert_close(scaled_clip_range(epsilon, turn_ids, level, scaling), expected)

    @quick
    @given(first=st.integers(1, 2000), second=st.integers(1, 2000), epsilon=st.floats(1e-6, 5))
    def test_a_longer_turn_has_a_narrower_range_and_one_of_one_token_its_own(self, first, second, epsilon):
        for scaling, longest in (("sqrt_length", 2000), ("length", LONGEST)):
            of = {n: of_one_turn(epsilon, n, scaling) for n in (1, first, second)}
            assert of[1] == epsilon
            assert (of[first] > of[second]) == (min(first, longest) < min(second, longest))

    def test_beyond_some_length_it_is_the_range_of_gspos_authors(self):
        assert of_one_turn(0.2, 499, "length") == 0.2 / 499
        assert of_one_turn(0.2, 500, "length") == of_one_turn(0.2, 4000, "length") == pytest.approx(4e-4)
        assert of_one_turn(0.2, 4000, "sqrt_length") == pytest.approx(0.2 / 4000**0.5)

    @quick
    @given(turn_ids=turn_id_batches(), level=LEVELS, scaling=SCALINGS, seed=st.integers(0, 99))
    def test_rows_are_independent(self, turn_ids, level, scaling, seed):
        whole = scaled_clip_range(0.2, turn_ids, level, scaling)
        for row, alone in zip(whole, turn_ids, strict=True):
            assert torch.equal(scaled_clip_range(0.2, alone.unsqueeze(0), level, scaling)[0], row)

    def test_the_layout_serves_as_well(self):
        assert torch.equal(
            scaled_clip_range(0.2, turn_layout(LONG), "turn", "length"), scaled_clip_range(0.2, LONG, "turn", "length")
        )

    def test_apple_gpus_have_no_float64(self):
        assert (_widest(torch.device("mps")), _widest(torch.device("cpu"))) == (torch.float32, torch.float64)

    def test_errors(self):
        with pytest.raises(ValueError, match="`scaling` is 'log', but must be one of 'none', 'sqrt_length', 'length'"):
            scaled_clip_range(0.2, LONG, "turn", "log")


def ranges(turn_ids, level="turn", scaling="length", low=0.2, high=0.3):
    return [scaled_clip_range(side, turn_ids, level, scaling) for side in (low, high)]


class TestInThePlaceOfFloats:
    """Everything that takes a clip range takes one per token."""

    @quick
    @given(
        turn_ids=turn_id_batches(),
        seed=st.integers(0, 99),
        low=st.floats(0, 1),
        high=st.floats(0, 1),
        delta=st.one_of(st.none(), st.floats(1, 3)),
        double=st.booleans(),
    )
    def test_turns_of_one_token_are_the_token_level_to_the_last_bit(self, turn_ids, seed, low, high, delta, double):
        kept = turn_ids >= 0
        one_each = torch.where(kept, kept.long().cumsum(dim=1) - 1, -1)
        log_ratio, advantages = normal(turn_ids, seed, 0.3), normal(turn_ids, seed + 1)
        if not double:
            log_ratio, advantages = log_ratio.float(), advantages.float()
        ratio = importance_ratio(log_ratio, one_each, "turn").requires_grad_()
        for scaling in ("sqrt_length", "length"):
            scaled = [*ranges(one_each, "turn", scaling, low, high)]
            scaled.append(None if delta is None else 1 + scaled_clip_range(delta - 1, one_each, "turn", scaling))
            found, expected = (clipped_surrogate(ratio, advantages, *each) for each in (scaled, (low, high, delta)))
            assert torch.equal(found, expected)
            gradients = [torch.autograd.grad(each.sum(), ratio)[0] for each in (found, expected)]
            assert torch.equal(*gradients)
            clips = [is_clipped(ratio, advantages, *each) for each in (scaled, (low, high, delta))]
            assert torch.equal(*clips)
            shares = [
                turn_clip_fraction(log_ratio, one_each, *each, "geometric") for each in (scaled[:2], (low, high))
            ]
            assert torch.equal(*shares)

    @pytest.mark.parametrize("level", ["turn", "sequence"])
    @pytest.mark.parametrize("scaling", ["sqrt_length", "length"])
    @quick
    @given(turn_ids=turn_id_batches(), seed=st.integers(0, 99), delta=st.sampled_from([None, 1.4]))
    def test_the_surrogate_equals_the_reference(self, level, scaling, turn_ids, seed, delta):
        log_ratio, advantages = normal(turn_ids, seed, 0.4), normal(turn_ids, seed + 1)
        ratio = importance_ratio(log_ratio, turn_ids, level)
        low, high = ranges(turn_ids, level, scaling)
        bound = None if delta is None else 1 + scaled_clip_range(delta - 1, turn_ids, level, scaling)
        found = clipped_surrogate(ratio, advantages, low, high, bound)
        of = {side: reference.scaled_clip_range(side, turn_ids, level, POWERS[scaling]) for side in (0.2, 0.3, 0.4)}
        for i, t in (turn_ids >= 0).nonzero().tolist():
            limit = None if delta is None else 1 + float(of[0.4][i, t])
            sides = float(of[0.2][i, t]), float(of[0.3][i, t])
            expected = reference.clipped_surrogate(float(ratio[i, t]), float(advantages[i, t]), *sides, limit)
            assert found[i, t].item() == pytest.approx(expected, abs=1e-12)

    @quick
    @given(turn_ids=turn_id_batches(), seed=st.integers(0, 99), delta=st.sampled_from([None, 1.1, 1.4]))
    def test_clipped_is_where_the_surrogate_has_no_gradient(self, turn_ids, seed, delta):
        ratio = importance_ratio(normal(turn_ids, seed, 0.4), turn_ids, "turn").requires_grad_()
        advantages = normal(turn_ids, seed + 1)
        bound = None if delta is None else 1 + scaled_clip_range(delta - 1, turn_ids, "turn", "length")
        of_tokens = clipped_surrogate(ratio, advantages, *ranges(turn_ids), bound)
        (gradient,) = torch.autograd.grad(of_tokens.sum(), ratio)
        assert torch.equal(is_clipped(ratio, advantages, *ranges(turn_ids), bound), gradient == 0)

    def test_off_the_model_tokens_nothing_counts(self):
        kept, (low, high) = TURN_IDS >= 0, ranges(TURN_IDS)
        log_ratio, advantages = normal(TURN_IDS, 1, 0.3), normal(TURN_IDS, 2)
        for garbage in GARBAGE:
            filled = torch.where(kept, log_ratio, garbage)
            for op in (
                lambda x: clip_fraction(x, kept, low, high),
                lambda x: clip_penalty(x, kept, low, high, "unbiased"),
                lambda x: turn_clip_fraction(x, TURN_IDS, low, high, "geometric"),
                lambda x: clipped_surrogate(x.exp(), advantages, low, high)[kept],
                lambda x: is_clipped(x.exp(), advantages, low, high)[kept],
            ):
                result = op(filled)
                assert torch.equal(result, op(log_ratio))
                assert result.isfinite().all()

    def test_the_share_of_turns_by_hand(self):
        # Of four tokens and of one, all with a ratio of 1.1: the range of the first is 1 ± 0.05, of the other 1 ± 0.2.
        log_ratio = torch.full(LONG.shape, math.log(1.1))
        low, high = ranges(LONG, high=0.2)
        assert turn_clip_fraction(log_ratio, LONG, low, high, "geometric").tolist() == [0.5, 1.0, 0.0]
        assert turn_clip_fraction(log_ratio, LONG, low, 0.2, "geometric").tolist() == [0.0, 0.0, 0.0]
        assert turn_clip_fraction(-log_ratio, LONG, 0.2, high, "geometric").tolist() == [0.0, 0.0, 0.0]

    def test_of_turns(self):
        assert range_of_turns(0.2, turn_layout(LONG)) == 0.2
        of_turns = range_of_turns(scaled_clip_range(0.2, LONG, "turn", "length"), turn_layout(LONG))
        torch.testing.assert_close(of_turns, float64([[0.05, 0.2], [0.2 / 9, 0], [0, 0]]))

    def test_outside_by_hand(self):
        ratio = torch.tensor([0.94, 0.96, 1.04, 1.06, math.nan])
        assert is_outside(ratio, 0.05, 0.05).tolist() == [True, False, False, True, False]
        low, high = torch.tensor([0.1, 0.01, 1, 1, 1]), torch.tensor([1, 1, 0.01, 0.1, 1])
        assert is_outside(ratio, low, high).tolist() == [False, True, True, False, False]


class TestWhichPowerFitsWhichRatio:
    """What docs/paper_to_code.md says of the two means. The old policy sampled the tokens: their mean ratio is 1."""

    SIGMA = 0.3

    def walks(self, tokens, coherent=False, rows=4000):
        noise = normal(torch.zeros(rows, 1 if coherent else tokens), seed=tokens, scale=self.SIGMA)
        return (noise - self.SIGMA**2 / 2).expand(rows, tokens)

    def outside(self, tokens, scaling, turn_ratio, coherent=False):
        """Shares of turns below and above the range."""
        log_ratio = self.walks(tokens, coherent)
        turn_ids = torch.zeros(log_ratio.shape, dtype=torch.int64)
        ratio = importance_ratio(log_ratio, turn_ids, "turn", turn_ratio)
        low, high = ranges(turn_ids, "turn", scaling, 0.2, 0.2)
        below, above = is_outside(ratio, low, math.inf), is_outside(ratio, math.inf, high)
        return below[:, 0].double().mean().item(), above[:, 0].double().mean().item()

    @pytest.mark.parametrize("tokens", [1, 10, 100, 1000])
    def test_an_arithmetic_mean_leaves_sqrt_length_equally_often_at_every_length(self, tokens):
        assert self.outside(tokens, "sqrt_length", "arithmetic") == pytest.approx((0.26, 0.24), abs=0.04)

    def test_a_geometric_mean_falls_below_it_as_turns_grow_long(self):
        """Its centre is below 1 by the KL per token, which no length shrinks."""
        below = [self.outside(n, "sqrt_length", "geometric")[0] for n in (1, 10, 100, 1000)]
        assert below == sorted(below)
        assert below[0] < 0.3
        assert below[-1] > 0.99

    def test_unscaled_no_long_turn_is_outside(self):
        for turn_ratio in ("geometric", "arithmetic"):
            assert sum(self.outside(100, "none", turn_ratio)) < 0.01 < sum(self.outside(1, "none", turn_ratio))

    def test_what_moves_together_does_not_average_out(self):
        """Then the length of a turn says nothing, and a range that narrows with it is left the more often."""
        for turn_ratio in ("geometric", "arithmetic"):
            alone, together = (sum(self.outside(n, "none", turn_ratio, coherent=True)) for n in (1, 100))
            assert together == pytest.approx(alone, abs=0.05)
            assert sum(self.outside(100, "length", turn_ratio, coherent=True)) > 0.9

    @pytest.mark.parametrize("tokens", [1, 4, 100, 500])
    @pytest.mark.parametrize(("joint", "is_out"), [(-0.23, True), (-0.19, False), (0.17, False), (0.21, True)])
    def test_length_is_the_range_of_the_joint_ratio_of_a_turn(self, tokens, joint, is_out):
        """Between (1 − ε/n)^n and (1 + ε/n)^n, which are 0.8 and 1.2 for one token, e^−0.2 and e^0.2 for many."""
        turn_ids = torch.zeros(1, tokens, dtype=torch.int64)
        log_ratio = normal(turn_ids, tokens)
        log_ratio += (joint - log_ratio.sum()) / tokens
        ratio = importance_ratio(log_ratio, turn_ids, "turn")
        assert is_outside(ratio, *ranges(turn_ids, high=0.2)).all().item() == is_out

    def test_an_arithmetic_mean_does_not_know_the_joint_ratio(self):
        """Why "length" is refused for it: the joint ratio is 1 here."""
        turn_ids = torch.zeros(1, 100, dtype=torch.int64)
        log_ratio = torch.tensor([0.1, -0.1], dtype=torch.float64).repeat(1, 50)
        for turn_ratio, is_out in (("geometric", False), ("arithmetic", True)):
            ratio = importance_ratio(log_ratio, turn_ids, "turn", turn_ratio)
            assert is_outside(ratio, *ranges(turn_ids, high=0.2)).any().item() == is_out
