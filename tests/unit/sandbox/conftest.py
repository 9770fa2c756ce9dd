from __future__ import annotations

import pytest
from benchmarks.worlds.invented import Population, build_invented

from sorl_trl.sandbox import World, WorldSize, build_atlas


@pytest.fixture(scope="session")
def atlas() -> World:
    return build_atlas(0)


@pytest.fixture(scope="session")
def invented() -> World:
    """A small world: 30 people, 8 companies, 9 cities, 4 lands."""
    population = Population(people=30, companies=8, cities=9, lands=4, first_names=8, last_names=9)
    return build_invented(0, population, WorldSize(train_questions=60, evaluation_questions=20))
