"""Credit of turns through the trainers: rewards normalized apart, and turns of one state compared."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from sorl_trl import SOGRPOTrainer
from sorl_trl.trainers.turns.recording import ScoredRollout
from tests.credit import BOTH_REWARDS, OF_PROMPTS, ROWS, rollout_of, turn_reward, turns_of
from tests.effects import build_trainer, effect
from tests.policies import build_policy
from tests.training import settings, train
from tests.trajectories import FixedRollout, parity_reward

ALL_ON = {**OF_PROMPTS, "turn_reward_normalization": "separate", "step_advantage_coef": 1.0, "gamma": 0.9}


def z(values: list[float]) -> list[float]:
    mean = sum(values) / len(values)
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1))
    return [(v - mean) / (spread + 1e-4) for v in values]


def assert_advantages(batch: dict[str, Any], expected: list[list[float]]) -> None:
    for got, turn_ids, row in zip(batch["advantages"], batch["turn_ids"], expected, strict=True):
        values = [0.0 if turn < 0 else row[turn] for turn in turn_ids.tolist()]
        assert got.tolist() == pytest.approx(values, rel=1e-4, abs=1e-4)


def discounted(rewards: list[float], gamma: float) -> list[float]:
    return [sum(gamma ** (j - k) * r for j, r in enumerate(rewards) if j >= k) for k in range(len(rewards))]


class TestSeparate:
    def test_turn_rewards_and_outcomes_are_normalized_apart(self, tmp_path: Path, tokenizer: Any) -> None:
        trainer = build_trainer(
            tmp_path, tokenizer, "SO-GRPO", reward_funcs=BOTH_REWARDS, turn_reward_normalization="separate", gamma=0.5
        )
        rollout, batch = rollout_of(trainer)
        ids = [list(row) for row in rollout.generated.completion_ids]
        of_turns = turn_reward([list(row) for row in rollout.generated.turn_ids], ids)
        outcomes = parity_reward(ids)
        assert None in of_turns, "no turn reward is missing: a weak test"
        expected: list[list[float]] = []
        for first in range(0, ROWS, 4):
            group = range(first, first + 4)
            turns = iter(z([reward for i in group for reward in of_turns[i] or []]))
            ends = z([outcomes[i] for i in group])
            for i in group:
                rewards = [0.0] * turns_of(rollout)[i] if of_turns[i] is None else [next(turns) for _ in of_turns[i]]
                rewards[-1] += ends[i - first]
                expected.append(discounted(rewards, 0.5))
        assert_advantages(batch, expected)
        rewarded = sum(len(row or ()) for row in of_turns) / sum(turns_of(rollout))
        assert trainer._metrics["train"]["turns/rewarded"] == [pytest.approx(rewarded)]
        assert 0 < rewarded < 1

    def test_it_makes_a_difference(self, tmp_path: Path, tokenizer: Any) -> None:
        effects = [
            effect(
                build_trainer(
                    tmp_path / kind,
                    tokenizer,
                    "SO-GRPO",
                    reward_funcs=BOTH_REWARDS,
                    turn_reward_normalization=kind,
                )
            )
            for kind in ("together", "separate")
        ]
        assert effects[0] != effects[1]


class SameObservations(FixedRollout):
    """Trajectories whose observations are one word, up to three times, so that states repeat."""

    def _trajectory(self, index: int) -> tuple[list[int], list[int]]:
        ids, turns = super()._trajectory(index)
        return [18 if turn < 0 else id_ for id_, turn in zip(ids, turns, strict=True)], turns


class TestStepAdvantages:
    @pytest.mark.parametrize("scale", ["group", "none"])
    def test_turns_of_one_state_are_compared(self, tmp_path: Path, tokenizer: Any, scale: str) -> None:
        overrides = {"gamma": 0.5, "scale_rewards": scale, "reward_funcs": BOTH_REWARDS}
        of_coef = []
        for coef in (0.0, 2.0):
            trainer = build_trainer(tmp_path / str(coef), tokenizer, "SO-GRPO", step_advantage_coef=coef, **overrides)
            trainer.rollout_func = SameObservations()
            rollout, batch = rollout_of(trainer, rows=16)
            of_coef.append(batch["advantages"])
        steps = step_advantages(rollout, 0.5, scale == "group")
        batch["advantages"] = (of_coef[1] - of_coef[0]) / 2.0
        assert_advantages(batch, steps)
        later = [value for row in steps for value in row[1:]]
        assert any(later), "no state repeats after the first turn: a weak test"

    def test_how_many_turns_share_a_state_is_logged(self, tmp_path: Path, tokenizer: Any) -> None:
        trainer = build_trainer(tmp_path, tokenizer, "SO-GRPO", step_advantage_coef=1.0)
        trainer.rollout_func = FixedRollout(max_turns=1)
        rollout_of(trainer)
        assert trainer._metrics["train"]["turns/shared_state"] == [1.0]

    def test_with_one_turn_it_is_the_groups_advantage_once_more(self, tmp_path: Path, tokenizer: Any) -> None:
        advantages = []
        for coef in (0.0, 1.0):
            trainer = build_trainer(tmp_path / str(coef), tokenizer, "SO-GRPO", step_advantage_coef=coef, gamma=0.9)
            trainer.rollout_func = FixedRollout(max_turns=1)
            advantages.append(rollout_of(trainer)[1]["advantages"])
        torch.testing.assert_close(advantages[1], 2 * advantages[0])

    def test_it_makes_a_difference(self, tmp_path: Path, tokenizer: Any) -> None:
        effects = [
            effect(build_trainer(tmp_path / str(coef), tokenizer, "SO-GRPO", step_advantage_coef=coef))
            for coef in (0.0, 1.0)
        ]
        assert effects[0] != effects[1]


def step_advantages(rollout: ScoredRollout, gamma: float, scale: bool) -> list[list[float]]:
    """GiGPO's, by the tokens of the observations themselves."""
    made, rewards = rollout.generated, rollout.turn_rewards.tolist()
    cells: dict[Any, list[tuple[int, int]]] = {}
    returns = [discounted(row[:turns], gamma) for row, turns in zip(rewards, turns_of(rollout), strict=True)]
    for row, (completion, turn_ids) in enumerate(zip(made.completion_ids, made.turn_ids, strict=True)):
        for turn in range(turns_of(rollout)[row]):
            start = turn_ids.index(turn)
            seen = start - next((i for i, t in enumerate(reversed(turn_ids[:start])) if t >= 0), start)
            observed = tuple(completion[seen:start])
            own = (row, turn) if turn and not observed else observed
            cells.setdefault((row // 4, turn == 0, own), []).append((row, turn))
    advantages = [[0.0] * len(row) for row in returns]
    for members in cells.values():
        values = [returns[row][turn] for row, turn in members]
        centred = z(values) if scale else [v - sum(values) / len(values) for v in values]
        for (row, turn), value in zip(members, centred, strict=True):
            advantages[row][turn] = value
    return advantages


def test_it_does_not_matter_how_a_rollout_is_split(tmp_path: Path, tokenizer: Any) -> None:
    runs = [
        train(
            SOGRPOTrainer,
            SOGRPOTrainer.config_class,
            tokenizer,
            reward_funcs=BOTH_REWARDS,
            rollout_func=SameObservations(),
            **settings(
                tmp_path / str(size),
                per_device_train_batch_size=size,
                steps_per_generation=16 // size,
                gradient_accumulation_steps=8 // size,
                optim="sgd",
                **ALL_ON,
            ),
        )
        for size in (8, 2)
    ]
    assert_weights(*runs)


def assert_weights(ours: Any, theirs: Any) -> None:
    start = build_policy().state_dict()
    moved = 0.0
    for (name, a), (_, b) in zip(ours.model.named_parameters(), theirs.model.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
        moved = max(moved, (a.detach() - start[name]).abs().max().item())
    assert moved > 1e-3, "the weights have not moved: a weak test"
