"""What the stability report says of its worlds, from records made by hand."""

from __future__ import annotations

from typing import Any

from benchmarks.stability_overview import worlds_text
from benchmarks.stability_report import make_rows, overview, rows
from benchmarks.stability_statistics import judged, read_runs

from tests.unit.benchmarks.runs import GRID, records


def in_turns_of(tokens: float, made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same records, with turns of so many tokens in the first rollout and of 99 in the second."""
    shape = [{"rollout/tokens_per_turn": each, "rollout/turns_per_trajectory": 2.5} for each in (tokens, 99)]
    return [record | {"rollouts": shape} for record in made]


def test_a_world_has_its_policy_and_its_turns_before_training() -> None:
    made = in_turns_of(4.0, records("grpo", (0.4,))) + in_turns_of(5.0, records("so_grpo", (0.4,)))
    made += records("grpo", (0.4,), "wild", 5e-4)
    assert worlds_text(read_runs(made, GRID), GRID).splitlines() == [
        "- **Flat** (Calm): questions without hills. 1,000 parameters; 2.5 turns of 4.5 tokens.",
        "- **High** (Wild): questions with hills. 1,000 parameters.",
    ]


def test_rows_carry_the_world_and_the_parameters() -> None:
    (row,) = rows(records("grpo", (0.4, 0.5), "wild", 5e-4), GRID)
    assert (row["world"], row["policy_parameters"]) == ("high", 1000)


def test_an_overview_per_world_has_intervals_and_collapses() -> None:
    made = records("grpo", (0.4, 0.2)) + records("so_grpo", (0.6, 0.8), "wild", 5e-4)
    assert overview(make_rows(judged(read_runs(made, GRID), GRID), GRID), GRID) == [
        "### Flat",
        "| method | Calm |\n| --- | ---: |\n| GRPO | 0.300 [0.200, 0.400]³ · 1/2 |\n",
        "### High",
        "| method | Wild |\n| --- | ---: |\n| SO-GRPO | 0.700 [0.600, 0.800]³ · 0/2 |\n",
    ]


def test_a_regime_may_name_its_methods() -> None:
    few = GRID.regimes["calm"].__class__(**vars(GRID.regimes["calm"]) | {"methods": ("ppo", "grpo")})
    grid = GRID.__class__(**vars(GRID) | {"regimes": {"calm": few}})
    assert grid.methods_in("calm") == ["grpo", "ppo"]
    assert GRID.methods_in("calm") == ["grpo", "so_grpo", "ppo"]


def test_a_cell_names_every_harness_of_its_runs() -> None:
    first, second = records("grpo", (0.4, 0.2))
    made = [first | {"harness": 1}, second]
    (_, table) = overview(make_rows(judged(read_runs(made, GRID), GRID), GRID), GRID)
    assert "0.300 [0.200, 0.400]¹³ · 1/2" in table
