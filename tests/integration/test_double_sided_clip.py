"""`double_sided_clip` in the trainers: outside the clip range no token pulls, whatever its advantage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_trl import SOGRPOConfig, SOGRPOTrainer, SOPPOConfig
from tests.effects import TRAINERS, build_trainer, effect
from tests.losses import EPSILON, gradient, off_policy_batch, token_logps
from tests.training import assert_same, settings, train

PLAIN = {"clip_normalization": "none", "num_iterations": 2}
POWER = {"none": 0.0, "sqrt_length": 0.5, "length": 1.0}


def units(turn_ids: Tensor, level: str) -> list[list[int]]:
    """The positions of one trajectory that share a ratio."""
    tokens = torch.nonzero(turn_ids >= 0).flatten().tolist()
    turns = [[t for t in tokens if turn_ids[t] == k] for k in range(int(turn_ids.max()) + 1)]
    return {"token": [[t] for t in tokens], "turn": turns, "sequence": [tokens]}[level]


def token_weight(turn_ids: Tensor, position: int, loss_type: str) -> float:
    """By what the mean of the loss type weighs one token of a batch of 8 trajectories."""
    if loss_type == "turn":
        return 1 / (int((turn_ids == turn_ids[position]).sum()) * (int(turn_ids.max()) + 1)) / 8
    return 1 / int((turn_ids >= 0).sum()) / 8


def reference_loss(trainer: Any, batch: dict[str, Any]) -> tuple[Tensor, float]:
    """The loss as a loop over units, and the share of tokens that are outside their range."""
    args = trainer.args
    log_ratio = token_logps(trainer, batch) - batch["old_per_token_logps"]
    total, dropped = torch.zeros((), dtype=torch.float64), 0
    for i, turn_ids in enumerate(batch["turn_ids"]):
        for unit in units(turn_ids, args.importance_sampling_level):
            ratio, advantage = log_ratio[i, unit].mean().exp(), batch["advantages"][i].double()
            reach = EPSILON / len(unit) ** POWER[args.clip_range_scaling_in_use]
            if not 1 - reach <= ratio <= 1 + reach:
                ratio, dropped = ratio.detach().clamp(1 - reach, 1 + reach), dropped + len(unit)
            total = total - ratio * advantage * sum(token_weight(turn_ids, t, args.loss_type) for t in unit)
    return total, dropped / int((batch["turn_ids"] >= 0).sum())


@pytest.mark.parametrize("scaling", ["none", "sqrt_length"])
@pytest.mark.parametrize("loss_type", ["turn", "grpo"])
@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
def test_loss_gradient_and_share_of_dropped_tokens(
    tmp_path: Path, tokenizer: Any, level: str, loss_type: str, scaling: str
) -> None:
    if level == "token" and scaling != "none":
        pytest.skip("a token has no length")
    fields = {"importance_sampling_level": level, "loss_type": loss_type, "clip_range_scaling": scaling}
    trainer, batch = off_policy_batch(tmp_path, tokenizer, double_sided_clip=True, **PLAIN, **fields)
    ours = trainer._compute_loss(trainer.model, batch)
    reference, dropped = reference_loss(trainer, batch)
    assert ours.item() == pytest.approx(reference.item(), abs=1e-6)
    torch.testing.assert_close(gradient(ours, trainer), gradient(reference, trainer), rtol=0, atol=1e-6)
    assert trainer._metrics["train"]["clip_ratio/region_mean"] == [pytest.approx(dropped)]
    assert 0 < dropped < 1
    trainer.args.double_sided_clip = False
    assert abs(trainer._compute_loss(trainer.model, batch).item() - ours.item()) > 1e-4


@pytest.mark.parametrize("loss_type", ["dr_grpo", "dapo", "bnpo", "luspo"])
def test_other_losses_with_a_min_take_it(tmp_path: Path, tokenizer: Any, loss_type: str) -> None:
    trainer, batch = off_policy_batch(tmp_path, tokenizer, double_sided_clip=True, loss_type=loss_type, **PLAIN)
    loss = trainer._compute_loss(trainer.model, batch)
    trainer.epsilon_low = trainer.epsilon_high = 0.0  # now every ratio is outside
    assert gradient(loss, trainer).abs().max() > 0
    assert gradient(trainer._compute_loss(trainer.model, batch), trainer).abs().max() < 1e-7


@pytest.mark.parametrize("level", ["token", "turn"])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_it_changes_training(tmp_path: Path, tokenizer: Any, trainer: str, level: str) -> None:
    effects = [
        effect(build_trainer(tmp_path / str(on), tokenizer, trainer, double_sided_clip=on, epsilon=0.01,
                             importance_sampling_level=level))
        for on in (False, True)
    ]  # fmt: skip
    assert effects[0] != effects[1]


def test_inside_the_range_it_is_ppo(tmp_path: Path, tokenizer: Any) -> None:
    wide = {"epsilon": 0.99, "epsilon_high": 99.0, "clip_range_scaling": "none", "importance_sampling_level": "turn"}
    runs = [
        train(SOGRPOTrainer, SOGRPOConfig, tokenizer, **settings(tmp_path, double_sided_clip=on, **wide))
        for on in (False, True)
    ]
    assert_same(*runs, tolerance=0)


@pytest.mark.parametrize("split", [(4, 2), (2, 4)])
def test_gradients_do_not_depend_on_micro_batches(tmp_path: Path, tokenizer: Any, split: tuple[int, int]) -> None:
    """Two plain SGD steps over the same eight trajectories."""
    weights = []
    for batch_size, accumulation in ((8, 1), split):
        arguments = settings(tmp_path, double_sided_clip=True, optim="sgd", learning_rate=3.0, max_steps=2)
        arguments |= {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
        arguments |= {"steps_per_generation": accumulation, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
        trainer = train(SOGRPOTrainer, SOGRPOConfig, tokenizer, **arguments)
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
        assert trainer.state.log_history[1]["clip_ratio/region_mean"] > 0
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("config_class", [SOGRPOConfig, SOPPOConfig])
@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "`double_sided_clip` is True.*'cispo'"),
        ({"loss_type": "sapo"}, "`double_sided_clip` is True.*'sapo'"),
        ({"loss_type": "vespo"}, "`double_sided_clip` is True.*'vespo'"),
        ({"delta": 4.0}, r"`delta` is 4\.0.*`double_sided_clip`"),
        ({"clip_normalization": "bias_norm"}, "bias_norm.*`double_sided_clip`"),
    ],
    ids=str,
)
def test_refused_where_there_is_no_min(
    tmp_path: Path, config_class: Any, others: dict[str, Any], message: str
) -> None:
    plain = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    config_class(**plain, **others)
    config_class(**plain, double_sided_clip=True)
    with pytest.raises(ValueError, match=message):
        config_class(**plain, double_sided_clip=True, **others)
