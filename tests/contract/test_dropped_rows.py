"""A loss from whose batch rows, turns or tokens are dropped is the loss of a batch that never had them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_trl import SOGRPOConfig, SOGRPOTrainer
from sorl_trl.trainers.turns.dropping import drop
from tests import losses
from tests.critics import BATCH_SIZE, rollout_batch
from tests.losses import gradient
from tests.ppo_losses import build
from tests.training import settings, train

pytestmark = pytest.mark.trains

KEPT = torch.tensor([True, False, True, True, False, False, True, True])
LOSS_TYPES = ("turn", "grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo", "minirl")


def without(batch: dict[str, Any], rows: Tensor) -> dict[str, Any]:
    """The batch that has only these rows, and counts only theirs."""
    part = {key: value[rows] if value.dim() else value for key, value in batch.items()}
    part["num_items_in_batch"] = (part["turn_ids"] >= 0).sum()
    return part


def assert_same_loss(trainer: Any, batch: dict[str, Any], other: dict[str, Any]) -> None:
    ours, theirs = trainer._compute_loss(trainer.model, batch), trainer._compute_loss(trainer.model, other)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6, abs=1e-6)
    expected = gradient(theirs, trainer)
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(gradient(ours, trainer), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
def test_rows_leave_every_loss(tmp_path: Path, tokenizer: Any, loss_type: str, level: str) -> None:
    overrides = {"loss_type": loss_type, "importance_sampling_level": level, "epsilon_high": 2.0, "beta": 0.1}
    trainer, batch = losses.off_policy_batch(tmp_path, tokenizer, num_iterations=2, **overrides)
    expected = without(batch, KEPT)
    drop(batch, KEPT, trainer.accelerator)
    assert_same_loss(trainer, batch, expected)
    assert trainer.beta == 0.1


def test_the_entropy_bonus_is_not_scaled(tmp_path: Path, tokenizer: Any) -> None:
    trainer, batch = losses.off_policy_batch(tmp_path, tokenizer, num_iterations=2, entropy_coef=0.5)
    expected = without(batch, KEPT)
    drop(batch, KEPT, trainer.accelerator)
    assert_same_loss(trainer, batch, expected)


@pytest.mark.parametrize("loss_type", ["turn", "grpo", "luspo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("advantage_level", ["turn", "token"])
def test_rows_leave_the_critics_loss(tmp_path: Path, tokenizer: Any, loss_type: str, advantage_level: str) -> None:
    overrides = {"loss_type": loss_type, "advantage_level": advantage_level, "vf_coef": 3.0}
    trainer = build(tmp_path, tokenizer, num_iterations=2, **overrides)
    batch = rollout_batch(trainer)
    generator = torch.Generator().manual_seed(7)
    for key in ("old_per_token_logps", "old_values", "returns"):
        batch[key] = batch[key] + 0.5 * torch.randn(batch[key].shape, generator=generator)
    kept = KEPT.repeat(BATCH_SIZE // len(KEPT))
    expected = without(batch, kept)
    drop(batch, kept, trainer.accelerator)
    for each in (batch, expected):
        each["value_units"] = trainer._value_units(each["turn_ids"]).sum()
    assert_same_loss(trainer, batch, expected)


@pytest.mark.parametrize("normalization", ["kl_penalty", "bias_norm"])
def test_rows_leave_what_normalizes_clipping(tmp_path: Path, tokenizer: Any, normalization: str) -> None:
    overrides = {"clip_normalization": normalization, "max_grad_norm": 0.0, "optim": "sgd", "learning_rate": 3.0}
    trainer, batch = losses.off_policy_batch(tmp_path, tokenizer, num_iterations=2, **overrides)
    expected = without(batch, KEPT)
    drop(batch, KEPT, trainer.accelerator)
    assert_same_loss(trainer, batch, expected)
    if trainer._bias_normalizer is not None:
        norms = []
        for each in (batch, expected):
            trainer._bias_normalizer._gradients = None
            trainer._compute_loss(trainer.model, each)
            norms.append(trainer._bias_normalizer.normalize(trainer.accelerator))
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_turn_leaves_the_mean_over_turns(tmp_path: Path, tokenizer: Any) -> None:
    """What is left is numbered anew: a gap would be a turn of 0 in the mean."""
    trainer, batch = losses.off_policy_batch(tmp_path, tokenizer, num_iterations=2)
    batch["advantages"] = batch["advantages"].unsqueeze(1).expand(batch["turn_ids"].shape).clone()
    before = losses_of_turns(trainer, batch)
    first = batch["turn_ids"] == 0
    rows = batch["turn_ids"].amax(1) > 0  # the others lose all that they have
    assert rows.any()
    assert not rows.all()
    drop(batch, ~first, trainer.accelerator)
    del batch["turn_counts"]
    assert batch["turn_ids"][rows].amax(1).tolist() == [turns - 2 for turns in map(len, before) if turns > 1]
    expected = [sum(turns[1:]) / (len(turns) - 1) for turns in before if len(turns) > 1]
    found = trainer._compute_loss(trainer.model, batch).item()
    assert found == pytest.approx(sum(expected) / len(expected), abs=1e-6)


def losses_of_turns(trainer: Any, batch: dict[str, Any]) -> list[list[float]]:
    """Of each trajectory, minus the clipped surrogate of its turns, and its penalty shared among none of them."""
    trainer.args.clip_normalization = "none"
    logps = losses.token_logps(trainer, batch).detach()
    found: list[list[float]] = []
    for i, turn_ids in enumerate(batch["turn_ids"]):
        found.append([])
        for k in range(int(turn_ids.max()) + 1):
            span = turn_ids == k
            ratio = (logps[i] - batch["old_per_token_logps"][i])[span].mean().exp()
            advantage = batch["advantages"][i][span][0].double()
            clipped = ratio.clamp(1 - losses.EPSILON, 1 + losses.EPSILON)
            found[-1].append(-torch.minimum(ratio * advantage, clipped * advantage).item())
    return found


@pytest.mark.parametrize("loss_type", ["turn", "dapo", "sapo"])
def test_everything_dropped_is_a_loss_of_nothing(tmp_path: Path, tokenizer: Any, loss_type: str) -> None:
    trainer, batch = losses.off_policy_batch(tmp_path, tokenizer, loss_type=loss_type, num_iterations=2, beta=0.1)
    drop(batch, torch.zeros(8, dtype=torch.bool), trainer.accelerator)
    del batch["turn_counts"]
    loss = trainer._compute_loss(trainer.model, batch)
    assert loss.item() == 0.0
    found = gradient(loss, trainer)
    assert torch.equal(found, torch.zeros_like(found))


class Dropping(SOGRPOTrainer):
    """Drops the trajectories whose first token is one of some words."""

    def _add_advantages(self, output: dict[str, Any], rollout: Any) -> None:
        super()._add_advantages(output, rollout)
        drop(output, output["completion_ids"][:, 0] % 3 != 0, self.accelerator)


@pytest.mark.parametrize("loss_type", ["turn", "dapo", "dr_grpo"])
@pytest.mark.parametrize("split", [(4, 2), (1, 8)])
def test_training_does_not_depend_on_micro_batches(
    tmp_path: Path, tokenizer: Any, loss_type: str, split: tuple[int, int]
) -> None:
    """Though some micro-batches lose all their rows."""
    weights = []
    for batch_size, accumulation in ((8, 1), split):
        arguments = settings(tmp_path, loss_type=loss_type, optim="sgd", learning_rate=3.0, max_steps=2, beta=0.1)
        arguments |= {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
        arguments |= {"steps_per_generation": accumulation, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
        trainer = train(Dropping, SOGRPOConfig, tokenizer, **arguments)
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=2e-6)
