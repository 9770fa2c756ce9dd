"""The substituted log-probabilities at the edges; tests/contract/test_turn_loss.py has the losses they lead to."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from sorl_trl.ops import LOG_RATIO_BOUND, log_importance_ratio, turn_layout
from sorl_trl.trainers.loss.ratio_substitution import RatioSubstitution

TURN_IDS = torch.tensor([[0, 0, -1, 1]])
OLD = torch.tensor([[-1.0, -2.0, -3.0, -4.0]])
REF = torch.tensor([[-1.5, -2.5, -3.5, -4.5]])


def substitute(logps: Tensor, turn_ratio: str | None, old: Tensor = OLD, linear: bool = False) -> RatioSubstitution:
    turns = turn_layout(TURN_IDS)
    units = turn_ratio and partial(log_importance_ratio, turn_ids=turns, level="turn", turn_ratio=turn_ratio)
    inputs = {"old_per_token_logps": old, "ref_per_token_logps": REF}
    substitution = RatioSubstitution(inputs, turns, units, linear=linear)
    substitution.inputs["substituted"] = substitution(logps)
    return substitution


@pytest.mark.parametrize("linear", [False, True])
def test_token_ratios_within_the_bound_are_left_as_they_are(linear: bool) -> None:
    logps = OLD + torch.tensor([[0.1, -3.0, 7.0, 19.9]])
    result = substitute(logps, None, linear=linear)
    assert torch.equal(result.inputs["substituted"], logps)
    assert torch.equal(result.inputs["ref_per_token_logps"], REF)


@pytest.mark.parametrize("turn_ratio", [None, "geometric", "arithmetic"])
@pytest.mark.parametrize("beyond", [95.0, -95.0])
def test_beyond_the_bound_the_ratio_is_the_bound_and_the_reference_kl_stays(
    turn_ratio: str | None, beyond: float
) -> None:
    logps = (OLD + torch.tensor([[0.0, 0.0, 0.0, beyond]])).requires_grad_()
    result = substitute(logps, turn_ratio)
    substituted = result.inputs["substituted"]
    log_ratio = substituted - result.inputs["old_per_token_logps"]
    assert log_ratio[0, 3].item() == pytest.approx(math.copysign(LOG_RATIO_BOUND, beyond))
    to_reference = result.inputs["ref_per_token_logps"] - substituted
    torch.testing.assert_close(to_reference, REF - logps)
    log_ratio[0, 3].backward(retain_graph=True)
    assert logps.grad.tolist() == [[0.0] * 4]


@pytest.mark.parametrize("turn_ratio", [None, "geometric", "arithmetic"])
@pytest.mark.parametrize("impossible", ["new", "old", "both"])
def test_a_token_of_probability_zero_leaves_everything_finite(turn_ratio: str | None, impossible: str) -> None:
    logps, old = OLD.clone(), OLD.clone()
    if impossible != "old":
        logps[0, 1] = -math.inf
    if impossible != "new":
        old[0, 1] = -math.inf
    logps.requires_grad_()
    result = substitute(logps, turn_ratio, old)
    log_ratio = result.inputs["substituted"] - result.inputs["old_per_token_logps"]
    log_ratio.exp().sum().backward()
    assert log_ratio.isfinite().all()
    assert result.log_ratio.abs().max() <= LOG_RATIO_BOUND
    assert logps.grad.isfinite().all()


def test_a_log_probability_that_is_not_a_number_is_not_hidden() -> None:
    assert substitute(torch.where(TURN_IDS == 1, math.nan, OLD), None).inputs["substituted"][0, 3].isnan()


def test_linear_losses_keep_each_tokens_own_gradient() -> None:
    logps = (OLD + torch.tensor([[0.5, -0.5, 0.0, 95.0]])).requires_grad_()
    substituted = substitute(logps, "geometric", linear=True).inputs["substituted"]
    substituted.sum().backward()
    assert logps.grad.tolist() == [[1.0] * 4]
    torch.testing.assert_close((substituted - OLD)[0], torch.tensor([0.0, 0.0, 0.0, LOG_RATIO_BOUND]))
