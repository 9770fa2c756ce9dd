"""Rollouts on fixed trajectories, with what their turns have earned."""

from __future__ import annotations

from typing import Any

from sorl_trl.trainers.turns.recording import ScoredRollout
from tests.trajectories import parity_reward, prompts

ROWS = 8
OF_PROMPTS = {"information_gain_coef": 1.0, "information_gain_column": "prompt"}
"""The prompt of fixed trajectories is as good an answer as any."""


def turn_reward(turn_ids: list[list[int]], completion_ids: list[list[int]], **_: Any) -> list[list[float] | None]:
    """One float per turn; nothing for every fourth trajectory or so, which has an outcome alone then."""
    return [
        None if sum(ids) % 4 == 0 else [(sum(ids) + 2 * turn) % 5 / 5 for turn in range(max(turns) + 1)]
        for turns, ids in zip(turn_ids, completion_ids, strict=True)
    ]


BOTH_REWARDS = [turn_reward, parity_reward]


def rollout_of(trainer: Any, rows: int = ROWS) -> tuple[ScoredRollout, dict[str, Any]]:
    """A rollout as its advantages are made of it, and the batch."""
    seen: list[ScoredRollout] = []
    add = trainer._add_advantages
    trainer._add_advantages = lambda output, rollout: (seen.append(rollout), add(output, rollout))
    batch = trainer._generate_and_score_completions([dict(prompts(rows)[i // 4]) for i in range(rows)])
    return seen[0], batch


def turns_of(rollout: ScoredRollout) -> list[int]:
    return rollout.turns.counts.tolist()
