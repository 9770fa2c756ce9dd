"""A small invented world, and a policy that is taught to search in it badly, in ten seconds."""

from __future__ import annotations

from pathlib import Path

from benchmarks.worlds.invented import Population, build_invented
from examples.quickstart import PolicyConfig, WarmStartConfig, World, WorldSize, warm_start

POPULATION = Population(people=120, companies=20, cities=24, lands=8, first_names=14, last_names=16)
PRACTICE_WORLDS = 4


def warm_start_config(seed: int) -> WarmStartConfig:
    return WarmStartConfig(policy=PolicyConfig(64, 2, 4), trajectories=2000, steps=250, seed=seed)


def build_world(number: int, train_questions: int, evaluation_questions: int) -> World:
    """The same words in all, other facts in each."""
    return build_invented(number, POPULATION, WorldSize(train_questions, evaluation_questions))


def to_learn_in(seed: int) -> tuple[World, World]:
    """A world to train in, and another to be examined in."""
    return build_world(1000 * seed, 200, 1), build_world(1000 * seed + 1, 1, 100)


def taught_policy(seed: int, cache: Path) -> Path:
    """What has practised in other worlds: it answers a third of the questions when it samples."""
    practice = [build_world(1000 * seed + 2 + i, 200, 1) for i in range(PRACTICE_WORLDS)]
    return warm_start(to_learn_in(seed)[0], practice, cache, warm_start_config(seed))
