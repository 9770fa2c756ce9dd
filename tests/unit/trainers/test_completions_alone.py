"""What the head says of completions is the same, whether or not it reads prompts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_trl.trainers.critic.model import ValuesBesideLogps
from sorl_trl.trainers.loss.completions_alone import CompletionsAlone
from tests.critics import policy_with

LENGTH, COMPLETION = 9, 4


def inputs() -> dict[str, Tensor]:
    """The last row is padded on the left, the second on the right, the first is masked in its whole completion."""
    ids = torch.randint(4, 32, (3, LENGTH), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[-1, :2] = 0
    mask[1, -2:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-COMPLETION] = labels[0] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def said(alone: bool, kind: str) -> tuple[Any, Tensor, dict[str, Tensor]]:
    """The output, values and gradients of a loss of both."""
    policy, _ = policy_with(kind)
    beside = ValuesBesideLogps(policy)
    model = CompletionsAlone(beside, policy, COMPLETION) if alone else beside
    output = model(**inputs(), fused_lm_head=True)
    values = beside.values(COMPLETION)
    (output.log_probs.square().sum() + output.entropy.sum() + values.square().sum()).backward()
    return output, values, {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["head", "trunk", "adapter", "model"])
def test_logps_values_and_gradients_are_those_of_the_whole(kind: str) -> None:
    whole, values_of_whole, gradients_of_whole = said(False, kind)
    output, values, gradients = said(True, kind)
    assert output.log_probs.shape == (3, COMPLETION), "prompts went through the head"
    for name in ("log_probs", "entropy"):
        torch.testing.assert_close(output[name], whole[name][:, -COMPLETION:], rtol=0, atol=1e-6)
    torch.testing.assert_close(values, values_of_whole, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradients, gradients_of_whole, rtol=1e-5, atol=1e-6)


def test_the_policy_is_left_as_it_was() -> None:
    policy, _ = policy_with("head")
    CompletionsAlone(policy, policy, COMPLETION)(**inputs(), fused_lm_head=True)
    assert policy(input_ids=inputs()["input_ids"]).logits.shape[1] == LENGTH
