"""Fixed multi-turn trajectories: what a rollout would return, without one."""

from __future__ import annotations

import random
from typing import Any

import torch
from datasets import Dataset

MODEL_WORDS = range(4, 18)
OBSERVATION_WORDS = range(18, 32)


def prompts(count: int = 8) -> Dataset:
    return Dataset.from_list([{"prompt": f"w{i} w{i + 1}"} for i in range(count)])


class FixedRollout:
    """A `rollout_func` whose n-th call gives the same trajectories, however many processes share them.

    Trajectories have 1 to `max_turns` turns, and some turns follow each other without an observation.
    """

    def __init__(self, max_turns: int = 3) -> None:
        self.calls = 0
        self.max_turns = max_turns

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        rank = trainer.accelerator.process_index
        first = rank * len(prompts)
        rows = [self._trajectory(self.calls * 10_000 + first + i) for i in range(len(prompts))]
        self.calls += 1
        return {
            "prompt_ids": [trainer._tokenizer(prompt)["input_ids"] for prompt in prompts],
            "completion_ids": [ids for ids, _ in rows],
            "logprobs": None,
            "env_mask": [[int(turn >= 0) for turn in turns] for _, turns in rows],
            "turn_ids": [turns for _, turns in rows],
        }

    def _trajectory(self, index: int) -> tuple[list[int], list[int]]:
        rng = random.Random(f"0-{index}")
        ids: list[int] = []
        turns: list[int] = []
        count = rng.randint(1, self.max_turns)
        for turn in range(count):
            length = rng.randint(1, 4)
            ids += rng.choices(MODEL_WORDS, k=length)
            turns += [turn] * length
            if turn < count - 1:
                length = rng.randint(0, 3)
                ids += rng.choices(OBSERVATION_WORDS, k=length)
                turns += [-1] * length
        if rng.random() < 0.8:  # the others were cut off
            ids.append(1)
            turns.append(count - 1)
        return ids, turns


class SeveralContexts(FixedRollout):
    """Every second turn is sampled in a context that reads the last observation, and what it repeats, afresh.

    The turns between them go on in the first context, which knows nothing of the others.
    """

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        output = super().__call__(prompts, trainer)
        columns: list[list[list[int]]] = [[], [], []]
        for prompt, ids, turns in zip(*(output[n] for n in ("prompt_ids", "completion_ids", "turn_ids")), strict=True):
            for column, row in zip(columns, _in_contexts(prompt, ids, turns), strict=True):
                column.append(row)
        ids, turns, contexts = columns
        mask = [[int(turn >= 0) for turn in row] for row in turns]
        return {**output, "completion_ids": ids, "turn_ids": turns, "context_ids": contexts, "env_mask": mask}


def _in_contexts(prompt: list[int], ids: list[int], turns: list[int]) -> tuple[list[int], list[int], list[int]]:
    """A trajectory's tokens, turn ids and context ids."""
    read: tuple[list[int], list[int], list[int]] = ([], [], [])
    for token, turn in zip(ids, turns, strict=True):
        context = max(turn, 0) if turn % 2 else 0
        if context and context not in read[2]:
            again = [*prompt, *ids[:2]]
            for column, values in zip(read, (again, [-1] * len(again), [-context] * len(again)), strict=True):
                column.extend(values)
        for column, value in zip(read, (token, turn, context), strict=True):
            column.append(value)
    return read


def parity_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Deterministic, and different within a group."""
    return [(sum(ids) % 7) / 7 for ids in completion_ids]


def turn_reward(turn_ids: list[list[int]], completion_ids: list[list[int]], **_: Any) -> list[list[float]]:
    """One float per turn, a function of the trajectory alone."""
    return [
        [(sum(ids) + 2 * turn) % 5 / 5 for turn in range(max(turns, default=-1) + 1)]
        for turns, ids in zip(turn_ids, completion_ids, strict=True)
    ]


def length_reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float | None]:
    """Leaves every fifth completion or so unscored."""
    return [None if sum(ids) % 5 == 0 else float(len(ids)) for ids in completion_ids]


class Team(FixedRollout):
    """Two agents take turns. Which two they are, and which of them begins, changes with the call and the row."""

    def __init__(self, *teams: tuple[str, str]) -> None:
        super().__init__()
        self.teams = teams

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        team = self.teams[self.calls % len(self.teams)]
        output = super().__call__(prompts, trainer)
        turns = [max(row) + 1 for row in output["turn_ids"]]
        return {**output, "agents": [[team[(i + k) % 2] for k in range(count)] for i, count in enumerate(turns)]}


class SearchDown(FixedRollout):
    """Two trajectories of the first call are without a token of the policy."""

    def _trajectory(self, index: int) -> tuple[list[int], list[int]]:
        ids, turns = super()._trajectory(index)
        return ids, [-1] * len(ids) if index in (1, 6) else turns


class Counting(FixedRollout):
    """Remembers the prompts of each rollout."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[list[str]] = []

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        self.asked.append(prompts)
        return super().__call__(prompts, trainer)


class Sampled(Counting):
    """Draws its trajectories with torch's random numbers, which checkpoints hold."""

    def _trajectory(self, index: int) -> tuple[list[int], list[int]]:
        return super()._trajectory(int(torch.randint(1000, ())))
