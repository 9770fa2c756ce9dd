"""A small invented world, and a policy that is taught to search in it badly, in ten seconds."""

from __future__ import annotations

from sorl_trl.sandbox import PolicyConfig, Population, WarmStartConfig, World, WorldSize, build_invented

POPULATION = Population(people=120, companies=20, cities=24, lands=8, first_names=14, last_names=16)
PRACTICE_WORLDS = 4


def warm_start_config(seed: int) -> WarmStartConfig:
    return WarmStartConfig(policy=PolicyConfig(64, 2, 4), trajectories=2000, steps=250, seed=seed)


def build_worlds(seed: int, *sizes: WorldSize) -> tuple[list[World], list[World]]:
    """A world of each size, and those to practise in: the same words in all, other facts in each."""
    practice = [WorldSize(200, 1)] * PRACTICE_WORLDS
    worlds = [build_invented(1000 * seed + i, POPULATION, size) for i, size in enumerate([*sizes, *practice])]
    return worlds[: len(sizes)], worlds[len(sizes) :]
