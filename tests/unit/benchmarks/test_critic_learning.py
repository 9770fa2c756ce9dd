"""The benchmark's own ways to train a critic."""

from __future__ import annotations

import pytest
import torch
from benchmarks.critic_learning import Learner, Variant
from benchmarks.critic_sampling import Sample, joined, sample_from

from sorl_trl.trainers.critic.model import ValueHead
from sorl_trl.trainers.critic.value_model import ValueModel
from tests.policies import build_policy


def rollout(returns: list[float]) -> Sample:
    texts = [torch.tensor([3, 4, 5, 6, 7]), torch.tensor([3, 5, 4])]
    return sample_from(texts, [torch.tensor([0, 3]), torch.tensor([1])], torch.tensor(returns))


def critic() -> ValueModel:
    backbone = build_policy().base_model
    head = ValueHead(backbone.config.hidden_size)
    torch.nn.init.constant_(head.weight, 0.1)
    return ValueModel(backbone, head)


def test_joined_samples_are_padded() -> None:
    short = sample_from([torch.tensor([9])], [torch.tensor([0])], torch.tensor([1.0]))
    both = joined([rollout([1.0, 0.0]), short])
    assert both.input_ids.tolist() == [[3, 4, 5, 6, 7], [3, 5, 4, 0, 0], [9, 0, 0, 0, 0]]
    assert both.before_turns.tolist() == [[0, 3], [1, -1], [0, -1]]
    assert both.lengths.tolist() == [5, 3, 1] and both.returns.tolist() == [1.0, 0.0, 1.0]


def test_targets_are_the_returns_unless_lambda_is_below_one() -> None:
    sample, model = rollout([1.0, 0.0]), critic()
    assert Learner(model, Variant(""))._targets(sample)[0].tolist() == pytest.approx([1.0, 1.0])
    learner = Learner(model, Variant("", gae_lambda=0.5))
    # V(s_1) counts half where turn 0's return is estimated.
    value = learner.values(sample)[0, 1].item()
    assert learner._targets(sample)[0].tolist() == pytest.approx([0.5 * value + 0.5, 1.0])


def test_normalization_moves_no_value() -> None:
    sample = rollout([1.0, 0.0])
    learner = Learner(critic(), Variant("", normalized=0.5, passes=0))
    learner.learn(sample)
    before = learner.values(sample)
    learner.learn(rollout([5.0, 3.0]))
    assert learner._mean == pytest.approx(0.5 * (2 / 3 + 13 / 3))
    torch.testing.assert_close(learner.values(sample), before)


@pytest.mark.parametrize("variant", [Variant("", passes=1), Variant("", passes=0, replayed=1)])
def test_learns_towards_the_targets(variant: Variant) -> None:
    sample, learner = rollout([1.0, 1.0]), Learner(critic(), variant)
    before = (learner.values(sample) - 1).abs().mean()
    for _ in range(10):
        learner.learn(sample)
    assert (learner.values(sample) - 1).abs().mean() < before / 2
