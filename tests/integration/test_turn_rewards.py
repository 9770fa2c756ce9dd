"""Turn rewards through the trainer: from what a function returns to the advantages of each token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sorl_trl import SOGRPOConfig, SOGRPOTrainer
from tests.policies import build_policy
from tests.training import settings
from tests.trajectories import FixedRollout, SearchDown, length_reward, parity_reward, prompts
from tests.unit.ops import reference


def build(tmp_path: Path, tokenizer: Any, reward_funcs: Any, rollout: Any = None, **overrides: Any) -> SOGRPOTrainer:
    arguments = settings(tmp_path, num_generations_eval=2, **overrides)
    return SOGRPOTrainer(
        build_policy(), reward_funcs, SOGRPOConfig(**arguments), prompts(), processing_class=tokenizer,
        rollout_func=rollout or FixedRollout(),
    )  # fmt: skip


def rollout_batch(trainer: SOGRPOTrainer) -> dict[str, Any]:
    """Eight trajectories: two groups of four in training, four of two in evaluation."""
    return trainer._generate_and_score_completions([dict(row) for row in prompts(2) for _ in range(4)])


def turns_of(batch: dict[str, Any]) -> list[int]:
    return [int(row.max()) + 1 for row in batch["turn_ids"]]


def uneven(row: int, turn: int) -> float:
    """Turn rewards whose spread is ten times as large in the second half of a batch."""
    return (row * 3 % 4 + turn * turn) * (1.0 if row < 4 else 10.0)


def uneven_reward(turn_ids: list[list[int]], **_: Any) -> list[list[float]]:
    return [[uneven(row, turn) for turn in range(max(ids) + 1)] for row, ids in enumerate(turn_ids)]


def returns_of(turn_rewards: list[float], gamma: float) -> list[float]:
    turns = range(len(turn_rewards))
    return [sum(gamma ** (j - k) * turn_rewards[j] for j in turns if j >= k) for k in turns]


def assert_advantages(batch: dict[str, Any], returns: list[list[float]]) -> None:
    """Each token has its turn's; a trajectory that is not scored, without returns, is in no baseline and has none."""
    expected: list[list[float]] = []
    for group in (returns[:4], returns[4:]):
        expected += reference.group_turn_advantages(group, [[1.0] * len(row) for row in group], scale=True)
    for got, turn_ids, row in zip(batch["advantages"], batch["turn_ids"], expected, strict=True):
        values = [row[turn] if row and turn >= 0 else 0.0 for turn in turn_ids.tolist()]
        assert got.tolist() == pytest.approx(values, rel=1e-4, abs=1e-5)


class TestAdvantages:
    def test_several_functions_and_discount(self, tmp_path: Path, tokenizer: Any) -> None:
        trainer = build(tmp_path, tokenizer, [uneven_reward, parity_reward], gamma=0.5, reward_weights=[1.0, 2.0])
        outcomes: list[float] = []
        trainer.reward_funcs[1] = lambda **kwargs: outcomes.extend(parity_reward(**kwargs)) or outcomes
        batch = rollout_batch(trainer)
        returns: list[list[float]] = []
        for row, (turns, outcome) in enumerate(zip(turns_of(batch), outcomes, strict=True)):
            turn_rewards = [uneven(row, turn) for turn in range(turns)]
            turn_rewards[-1] += 2.0 * outcome
            returns.append(returns_of(turn_rewards, 0.5))
        assert_advantages(batch, returns)

    @pytest.mark.parametrize(("scale", "training"), [("group", True), ("batch", True), ("group", False)])
    def test_an_outcome_on_the_last_turn_has_trls_advantage(
        self, tmp_path: Path, tokenizer: Any, scale: str, training: bool
    ) -> None:
        """In the batch and in the table of completions, with some trajectories unscored."""

        def as_turns(turn_ids: Any, **kwargs: Any) -> list[list[float] | None]:
            outcomes = zip(turn_ids, length_reward(**kwargs), strict=True)
            return [None if reward is None else [0.0] * max(row) + [reward] for row, reward in outcomes]

        advantages, tables = [], []
        for reward in (length_reward, as_turns):
            trainer = build(tmp_path, tokenizer, reward, scale_rewards=scale)
            trainer.model.train(training)
            batch = rollout_batch(trainer)
            per_token = batch["advantages"] if reward is as_turns else batch["advantages"].unsqueeze(1)
            advantages.append(torch.where(batch["turn_ids"] >= 0, per_token, 0.0))
            tables.append(list(trainer._logs["advantages"]))
        torch.testing.assert_close(*advantages, rtol=0, atol=1e-5)
        assert tables[0] == pytest.approx(tables[1], abs=1e-5)


class TestUnscored:
    def test_unscored_trajectories_are_outside_the_baseline(self, tmp_path: Path, tokenizer: Any) -> None:
        """Not scored by any function, that is: row 2 has an outcome, row 6 turn rewards."""

        def turn_rewards(turn_ids: Any, **kwargs: Any) -> list[list[float] | None]:
            rewards = uneven_reward(turn_ids, **kwargs)
            return [None if row in (1, 2, 5) else reward for row, reward in enumerate(rewards)]

        def outcome(completions: Any, **_: Any) -> list[float | None]:
            return [None if row in (1, 5, 6) else 3.0 for row in range(len(completions))]

        batch = rollout_batch(build(tmp_path, tokenizer, [turn_rewards, outcome]))
        returns: list[list[float]] = []
        for row, turns in enumerate(turns_of(batch)):
            rewards = [0.0 if row == 2 else uneven(row, turn) for turn in range(turns)]
            rewards[-1] += 0.0 if row == 6 else 3.0
            returns.append([] if row in (1, 5) else returns_of(rewards, 1.0))
        assert_advantages(batch, returns)

    @pytest.mark.parametrize("reward", [100.0, [100.0] * 3], ids=str)
    def test_a_trajectory_without_a_turn_is_unscored(self, tmp_path: Path, tokenizer: Any, reward: Any) -> None:
        """Its search was down: the function may have seen turns that training does not."""

        def rewards(turn_ids: Any, **kwargs: Any) -> list[Any]:
            scored = uneven_reward(turn_ids, **kwargs)
            return [reward if max(ids) < 0 else row for ids, row in zip(turn_ids, scored, strict=True)]

        trainer = build(tmp_path, tokenizer, rewards, SearchDown())
        batch = rollout_batch(trainer)
        assert [row for row, turns in enumerate(turns_of(batch)) if turns == 0] == [1, 6]
        returns = [
            returns_of([uneven(row, turn) for turn in range(turns)], 1.0) for row, turns in enumerate(turns_of(batch))
        ]
        assert_advantages(batch, returns)
        totals = [row[0] for row in returns if row]
        assert trainer._metrics["train"]["reward"] == [pytest.approx(sum(totals) / 6)]
        assert trainer._metrics["train"]["trajectories_without_turn"] == [0.25]
