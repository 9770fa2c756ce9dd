from __future__ import annotations

import pytest
from benchmarks.worlds.invented import Population, build_invented

from sorl_trl.sandbox import World


def words(world: World) -> set[str]:
    return {word for passage in world.passages for word in passage.text.split()}


def test_the_same_seed_gives_the_same_world():
    assert build_invented(3) == build_invented(3)


def test_worlds_of_other_seeds_share_words_and_hardly_any_fact():
    one, other = build_invented(1), build_invented(2)
    assert len(words(one) & words(other)) > 0.9 * len(words(one))
    shared = {passage.text for passage in one.passages} & {passage.text for passage in other.passages}
    assert len(shared) < 0.05 * len(one.passages)
    assert one.guess_rate() < 0.1


def test_an_impossible_population_is_refused():
    with pytest.raises(ValueError, match="`cities` is 0"):
        Population(cities=0)
    with pytest.raises(ValueError, match=r"`people` is 7, but must be at most .*, which is 6"):
        Population(people=7, first_names=2, last_names=3)
