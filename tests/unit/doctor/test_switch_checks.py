"""Switches of groups and credit, and rewards, that a recipe cannot have together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sorl_trl.doctor import examine
from tests.unit.doctor.recipes import QUESTIONS, line_of, the_complaint, write_recipe, write_rows

CASES: dict[str, tuple[Any, ...]] = {
    "no such reward": (
        {"group_filter": "zero_variance", "group_filter_reward": "exact_match"},
        "switches",
        "`group_filter_reward` is 'exact_match', but must be the name of a reward function: one of "
        "'exact_match_reward'.",
        "group_filter_reward: exact_match_reward",
    ),
    "nothing to refill with": (
        {"group_filter": "zero_variance", "group_refill": 1, "num_generations": 2, "num_iterations": 2},
        "switches",
        "`group_refill` is 1, but `train_questions` has 8 prompts and a rollout takes 8: there must be as many others",
        "group_refill: 0",
    ),
    "no column of answers": (
        {"information_gain_coef": 1.0, "information_gain_column": "gold"},
        "switches",
        "`train_questions` has no column 'gold', but `information_gain_coef` is 1.0",
        "information_gain_column: golden_answers",
    ),
    "one kind of reward": (
        {"turn_reward_normalization": "separate"},
        "switches",
        "none of `rewards` is one float per turn (search_hit, turn_format), and `information_gain_coef` is 0",
        "turn_reward_normalization: together",
        "warning",
    ),
    "turn rewards and their aggregation": (
        {"rewards": ["turn_format"], "multi_objective_aggregation": "normalize_then_sum"},
        "arguments",
        "but `rewards` has 'turn_format', and turn rewards need 'sum_then_normalize'",
        "multi_objective_aggregation: sum_then_normalize",
    ),
    "a penalty that all would pay": (
        {"rewards": ["f1_plus"], "corpus": None, "no_search": True},
        "arguments",
        "`rewards` has 'f1_plus', which takes 0.1 off a trajectory that has not searched, but with `no_search`",
        'rewards: ["f1"]',
    ),
}
"""What is changed, the check that sees it, what it says, the argument to change, and perhaps the level."""


@pytest.mark.parametrize("name", CASES)
def test_one_thing_is_wrong(tmp_path: Path, name: str) -> None:
    changed, check, what, change, *level = CASES[name]
    recipe = write_recipe(tmp_path, **changed)
    found = the_complaint(recipe)
    assert (found.check, found.level) == (check, *(level or ["error"]))
    assert what in found.what
    argument = change.partition(":")[0]
    place = line_of(recipe, argument) if f"\n{argument}:" in recipe.read_text() else f"(not in {recipe} yet)"
    assert found.change == f"{change}  {place}"


def test_a_column_of_numbers_holds_no_answers(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, information_gain_coef=1.0, information_gain_column="hops")
    write_rows(tmp_path / "train.jsonl", [{**each, "metadata": {"hops": 2}} for each in QUESTIONS])
    found = the_complaint(recipe)
    assert found.what.startswith("The column 'hops' holds 2, but `information_gain_column` must hold a string")
    assert found.change.startswith("information_gain_column: golden_answers  ")


def test_what_needs_no_questions_is_said_without_them(tmp_path: Path) -> None:
    named = {"group_filter": "top_k", "group_filter_reward": "f1", "group_refill": 1}
    found = examine(str(write_recipe(tmp_path, train_questions="gone.jsonl", rewards=["f1", "format"], **named)))
    of_switches = [(each.level, each.what.partition(",")[0]) for each in found if each.check == "switches"]
    # A recipe says `f1`, and a trainer knows functions by their names.
    assert of_switches == [("error", "`group_filter_reward` is 'f1'"), ("skipped", "not checked")]
