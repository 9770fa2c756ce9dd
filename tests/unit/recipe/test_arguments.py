"""What `train.py` refuses before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sorl_trl.recipe import TaskArguments, parse_arguments
from tests.unit.doctor.recipes import write_recipe


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ("f1", r"`rewards` is 'f1', but must be a list, such as \[f1\]"),
        ("taste", r"`rewards` is 'taste', but must be a list, such as \[exact_match\]"),
        (7, r"`rewards` is 7, but must be a list, such as \[exact_match\]"),
        ({"f1": 1}, r"`rewards` is {'f1': 1}, but must be a list, such as \[exact_match\]"),
        ([], r"`rewards` is \[\]; choose from \['answer', "),
        (["f1", "taste", {"f1": 1}], r"`rewards` is \['taste', {'f1': 1}\]; choose from \['answer', "),
    ],
)
def test_rewards_that_are_none(rewards: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TaskArguments("nq", rewards=rewards)


@pytest.mark.parametrize(("value", "shown"), [("null", "None"), (0, "0"), (-1, "-1")])
def test_a_trajectory_needs_a_limit(tmp_path: Path, value: object, shown: str) -> None:
    recipe = write_recipe(tmp_path, max_completion_length=value)
    recipe.write_text(recipe.read_text().replace('"null"', "null"))
    with pytest.raises(ValueError, match=f"`max_completion_length` is {shown}, but must be at least 1"):
        parse_arguments(["--config", str(recipe)])


def test_a_source_on_the_command_line_takes_the_place_of_the_recipes(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, corpus=None, search_url="http://127.0.0.1:9/retrieve", search_request="skyrl")
    search = parse_arguments(["--config", str(recipe), "--corpus", str(tmp_path / "corpus.jsonl")]).search
    assert (search.corpus, search.search_url, search.search_request) == (
        str(tmp_path / "corpus.jsonl"),
        "",
        "search_r1",
    )
