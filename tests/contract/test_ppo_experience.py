"""From a rollout to advantages, returns and old values: the formulas as loops, and what is left out of both losses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_trl import SOPPOTrainer
from tests.critics import BATCH_SIZE, rollout_batch
from tests.losses import gradient, positions, token_logps
from tests.ppo_losses import (
    DISCOUNTED,
    LEVELS,
    assert_follows_the_formula,
    build,
    state_values,
    units_of,
)
from tests.trajectories import SearchDown, parity_reward, turn_reward
from tests.unit.ops import reference

pytestmark = pytest.mark.trains

# ---------------------------------------------------------------------------------------------------------------------
# Advantages and returns of a rollout
# ---------------------------------------------------------------------------------------------------------------------


def expected_experience(
    trainer: SOPPOTrainer, batch: dict[str, Any], turn_rewards: list[list[float]]
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """(B, T) advantages and returns, from the turn rewards of each trajectory (none where it is left out).

    And the means over time steps of the values and of the rewards that are still to come.
    """
    args, values = trainer.args, state_values(trainer, batch).detach()
    advantages, returns, kept = torch.zeros_like(values), torch.zeros_like(values), list[float]()
    of_units: dict[str, list[float]] = {"critic/value_mean": [], "critic/return_mean": []}
    for i, turn_ids in enumerate(batch["turn_ids"]):
        spans = positions(turn_ids)
        units = [unit for span in spans for unit in units_of(span, args)]
        rewards = [0.0] * len(units)
        for span, reward in zip(spans, turn_rewards[i], strict=True):
            rewards[next(u for u, unit in enumerate(units) if span[-1] in unit)] += reward
        read = [values[i, unit[0]].item() for unit in units]
        found = reference.gae(rewards, read, [1.0] * len(units), args.gamma, args.gae_lambda)
        of_units["critic/value_mean"] += read
        of_units["critic/return_mean"] += reference.gae(
            rewards, [0.0] * len(units), [1.0] * len(units), args.gamma, 1.0
        )[0]
        for unit, advantage, target in zip(units, *found, strict=True):
            advantages[i, unit], returns[i, unit] = advantage, target
            kept.append(advantage)
    if args.whiten_advantages:
        mean = sum(kept) / len(kept)
        spread = math.sqrt(sum((a - mean) ** 2 for a in kept) / (len(kept) - 1) + 1e-8)
        advantages = torch.where(batch["turn_ids"] >= 0, (advantages - mean) / spread, 0.0)
    return advantages, returns, {name: sum(each) / len(each) for name, each in of_units.items()}


def completions_of(batch: dict[str, Any]) -> list[list[int]]:
    """What the reward functions saw: all tokens of each completion."""
    pairs = zip(batch["completion_ids"], batch["completion_mask"], strict=True)
    return [ids[mask.bool()].tolist() for ids, mask in pairs]


def rewards_of(batch: dict[str, Any]) -> list[list[float]]:
    """The sum of both reward functions, turn by turn, of the trajectories that have turns."""
    ids = completions_of(batch)
    rows = turn_reward(batch["turn_ids"].tolist(), ids)
    for row, outcome in zip(rows, parity_reward(ids), strict=True):
        if row:
            row[-1] += outcome
    return rows


def assert_experience(trainer: SOPPOTrainer, batch: dict[str, Any], turn_rewards: list[list[float]]) -> None:
    advantages, returns, means = expected_experience(trainer, batch, turn_rewards)
    for key, tensor in (("advantages", advantages), ("returns", returns)):
        torch.testing.assert_close(batch[key].double(), tensor.double(), rtol=1e-4, atol=1e-5, msg=key)
    metrics = trainer._metrics["train"]
    assert {name: metrics[name][-1] for name in means} == pytest.approx(means, abs=1e-5)


def assert_old_values(trainer: SOPPOTrainer, batch: dict[str, Any]) -> None:
    kept, expected = batch["turn_ids"] >= 0, state_values(trainer, batch)
    torch.testing.assert_close(batch["old_values"][kept].double(), expected[kept], rtol=0, atol=1e-5)
    assert not batch["old_values"].requires_grad


@pytest.mark.parametrize("whiten", [True, False], ids=["whitened", "plain"])
@pytest.mark.parametrize("level", LEVELS)
def test_advantages_and_returns(tmp_path: Path, tokenizer: Any, level: str, whiten: bool) -> None:
    overrides = {**LEVELS[level], "whiten_advantages": whiten, **DISCOUNTED}
    trainer = build(tmp_path, tokenizer, **overrides)
    batch = rollout_batch(trainer)
    assert_experience(trainer, batch, rewards_of(batch))
    assert_old_values(trainer, batch)
    if level == "turn":
        shown = list(trainer._logs["advantages"])
        starts = [[span[0] for span in positions(row)] for row in batch["turn_ids"]]
        means = [batch["advantages"][i, rows].mean().item() for i, rows in enumerate(starts)]
        assert shown == pytest.approx(means, abs=1e-5)


# ---------------------------------------------------------------------------------------------------------------------
# Trajectories that are left out
# ---------------------------------------------------------------------------------------------------------------------


def assert_no_trace(trainer: SOPPOTrainer, batch: dict[str, Any], rows: list[int]) -> None:
    """Whatever `rows` hold, tokens included, changes neither the loss nor its gradient."""
    assert (batch["turn_ids"][rows] == -1).all()
    assert not batch["advantages"][rows].any()
    mask = batch["completion_mask"] * batch["tool_mask"]
    assert not mask[rows].any()
    assert int(batch["num_items_in_batch"]) == int(mask.sum())
    loss = trainer._compute_loss(trainer.model, batch)
    assert torch.isfinite(loss)
    expected = gradient(loss, trainer)
    other = {key: value.clone() for key, value in batch.items()}
    other["completion_ids"][rows] = 9
    for key in ("old_values", "returns"):
        other[key][rows] = math.nan
    again = trainer._compute_loss(trainer.model, other)
    assert again.item() == loss.item()
    assert torch.equal(gradient(again, trainer), expected)


@pytest.mark.parametrize(("level", "loss_type"), [("turn", "turn"), ("token", "dapo")])
@pytest.mark.parametrize("reward", [None, -math.inf], ids=str)
def test_unscored_trajectories_leave_no_trace(
    tmp_path: Path, tokenizer: Any, reward: Any, level: str, loss_type: str
) -> None:
    unscored = [1, 6, 7]

    def some(completion_ids: Any, turn_ids: Any, **_: Any) -> list[Any]:
        rewards: list[Any] = turn_reward(turn_ids, completion_ids)
        return [reward if i in unscored else row for i, row in enumerate(rewards)]

    fields = {"beta": 0.1, "num_iterations": 2, "loss_type": loss_type, **LEVELS[level]}
    trainer = build(tmp_path, tokenizer, reward_funcs=[some], **fields)
    batch = rollout_batch(trainer)
    assert trainer._metrics["train"]["trajectories_unscored"] == [pytest.approx(3 / 16)]
    assert_no_trace(trainer, batch, unscored)
    scored = [i for i in range(BATCH_SIZE) if i not in unscored]
    alone = {key: value[scored] if value.dim() else value for key, value in batch.items() if key != "row_scale"}
    losses = [trainer._compute_loss(trainer.model, each).item() for each in (batch, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)  # what they divide by is without them too
    rewards = turn_reward(batch["turn_ids"].tolist(), completions_of(batch))
    assert_experience(trainer, batch, rewards)


@pytest.mark.parametrize("level", ["turn", "token"])
def test_a_trajectory_without_a_token_of_the_policy(tmp_path: Path, tokenizer: Any, level: str) -> None:
    trainer = build(tmp_path, tokenizer, rollout_func=SearchDown(), advantage_level=level, num_iterations=2)
    batch = rollout_batch(trainer)
    assert trainer._metrics["train"]["trajectories_without_turn"] == [pytest.approx(2 / 16)]
    assert trainer._metrics["train"]["trajectories_unscored"] == [0.0]
    assert_no_trace(trainer, batch, [1, 6])
    assert_experience(trainer, batch, rewards_of(batch))
    assert_follows_the_formula(trainer, batch)


# ---------------------------------------------------------------------------------------------------------------------
# Old values cost no pass where TRL makes one
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("num_iterations", [1, 2], ids=["aligned", "reused"])
def test_one_pass_of_the_policy_for_each_rollout(
    tmp_path: Path, tokenizer: Any, num_iterations: int, beta: float
) -> None:
    trainer = build(
        tmp_path, tokenizer, num_iterations=num_iterations, beta=beta, per_device_train_batch_size=4,
        gradient_accumulation_steps=4, steps_per_generation=4,
    )  # fmt: skip
    rollout_batch(trainer)  # whose first pass tries out layouts
    calls: list[int] = []
    trainer.model.register_forward_pre_hook(lambda *_: calls.append(0))
    batch = rollout_batch(trainer)
    assert len(calls) == 4  # 16 trajectories, 4 at a time
    assert ("old_per_token_logps" in batch) == (num_iterations == 2)
    assert_old_values(trainer, batch)


@pytest.mark.parametrize("num_iterations", [1, 2], ids=["aligned", "reused"])
def test_old_values_are_not_read_from_the_reference(tmp_path: Path, tokenizer: Any, num_iterations: int) -> None:
    """Of a PEFT model, which is its own reference with its adapter off."""
    trainer = build(tmp_path, tokenizer, lora=True, beta=0.1, num_iterations=num_iterations)
    batch = rollout_batch(trainer)
    assert_old_values(trainer, batch)
    expected = token_logps(trainer, batch).detach()
    assert (batch["ref_per_token_logps"] - expected)[batch["turn_ids"] >= 0].abs().max() > 1e-2
