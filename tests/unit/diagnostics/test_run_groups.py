from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sorl_trl.diagnostics.run_groups import Group, differing_settings, group_runs, places, settings_of
from sorl_trl.diagnostics.runs import Run, load_run


def told(name: str, history: Any = (), **settings: Any) -> Run:
    return Run(name, list(history), configuration={"settings.json": settings} if settings else {})


def ending(name: str, values: list[float], every: int = 1) -> Run:
    return Run(name, [{"step": place * every, "reward": value} for place, value in enumerate(values, 1)])


def names(groups: list[Group]) -> dict[str, list[str]]:
    return {group.name: [run.name for run in group.runs] for group in groups}


class TestGroups:
    def test_told_the_same_but_for_seeds_and_places(self) -> None:
        runs = [
            told("gspo_1", seed=1, level="sequence", output_dir="a"),
            told("grpo_1", seed=1, level="token"),
            told("gspo_2", seed=2, level="sequence", output_dir="b", data_seed=3),
            told("grpo", level="token", beta=0.1),
        ]
        found = group_runs(runs)
        assert names(found) == {"gspo (2 runs)": ["gspo_1", "gspo_2"], "grpo_1": ["grpo_1"], "grpo": ["grpo"]}
        assert places(found) == {"gspo_1": 0, "gspo_2": 0, "grpo_1": 1, "grpo": 2}

    def test_a_run_that_was_told_nothing_is_by_itself(self) -> None:
        assert [len(group.runs) for group in group_runs([told("a1"), told("a2"), told("a3", seed=3)])] == [1, 1, 1]

    def test_numbers_at_the_end_are_seeds_if_one_says_so(self) -> None:
        runs = [told("out/gspo-seed1"), told("out/gspo-seed02"), told("out/gspo"), told("lr_3/x"), told("lr_4/x")]
        expected = ["out/gspo (2 runs)", "out/gspo", "lr_3/x", "lr_4/x"]
        assert [*names(group_runs(runs, by_name=True))] == expected

    def test_names_that_have_nothing_in_common_are_counted(self) -> None:
        runs = [told(name, seed=seed, level="turn") for seed, name in enumerate(("monday", "tuesday", "1", "2"))]
        assert [*names(group_runs(runs))] == ["monday and 3 more"]
        assert [*names(group_runs([told("1", a=1), told("2", a=1)]))] == ["1 and 1 more"]

    def test_two_methods_of_one_name_are_told_apart(self) -> None:
        runs = [told("x_1", a=1), told("x_2", a=1), told("x_3", a=2), told("x_4", a=2)]
        assert [*names(group_runs(runs))] == ["x_1 and 1 more", "x_3 and 1 more"]

    @given(st.lists(st.integers(0, 3), min_size=1, max_size=30))
    def test_every_run_is_in_one_group(self, methods: list[int]) -> None:
        runs = [told(f"run{place}", seed=place, method=method) for place, method in enumerate(methods)]
        found = group_runs(runs)
        assert sorted(run.name for group in found for run in group.runs) == sorted(run.name for run in runs)
        assert len(found) == len(set(methods))
        assert len({group.name for group in found}) == len(found)


class TestSpread:
    def test_by_hand(self) -> None:
        group = Group("a", (ending("1", [1.0, 2.0, 3.0]), ending("2", [3.0, 2.0, 5.0])))
        spread = group.spread("reward")
        assert (spread.steps, spread.low, spread.mean, spread.high) == ((1, 2, 3), (1, 2, 3), (2, 2, 4), (3, 2, 5))

    def test_only_runs_that_have_come_that_far_count(self) -> None:
        spread = Group("a", (ending("1", [1.0]), ending("2", [3.0, 5.0]), Run("3", [{"step": 9, "x": 1.0}]))).spread(
            "reward"
        )
        assert (spread.steps, spread.mean) == ((1, 2), (2.0, 5.0))

    def test_between_its_points_a_run_is_on_a_line(self) -> None:
        spread = Group("a", (ending("1", [1.0, 3.0], every=2), ending("2", [0.0] * 4))).spread("reward")
        assert spread.steps == (1, 2, 3, 4)
        assert spread.high == (0.0, 1.0, 2.0, 3.0)
        assert spread.mean == (0.0, 0.5, 1.0, 1.5)

    def test_nothing(self) -> None:
        assert Group("a", (Run("1", []),)).spread("reward").steps == ()

    @given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8), min_size=1, max_size=5))
    def test_the_mean_is_between_the_lowest_and_the_highest(self, values: list[list[float]]) -> None:
        runs = tuple(ending(str(place), each) for place, each in enumerate(values))
        spread = Group("a", runs).spread("reward")
        for low, mean, high in zip(spread.low, spread.mean, spread.high, strict=True):
            assert low - 1e-9 <= mean <= high + 1e-9


class TestSettings:
    def test_those_that_differ(self) -> None:
        runs = [
            told("a", level="token", seed=1, epsilon=0.2, output_dir="x"),
            told("b", level="turn", seed=1, tags=["</a>"], epsilon=0.2, output_dir="y"),
            told("c"),
        ]
        assert differing_settings(runs) == {
            "epsilon": ["0.2", "0.2", "–"],
            "level": ["token", "turn", "–"],
            "seed": ["1", "1", "–"],
            "tags": ["–", '["</a>"]', "–"],
        }
        assert differing_settings(runs[:1]) == {}

    def test_what_training_was_told_comes_before_what_it_kept(self) -> None:
        files = {"settings.json": {"max_steps": 3}, "trainer_state.json": {"max_steps": 7, "eval_steps": 1}}
        assert settings_of(Run("a", [], configuration=files)) == {"max_steps": 3, "eval_steps": 1}

    @pytest.mark.parametrize("state", ["trainer_state.json", "checkpoint-2/trainer_state.json"])
    def test_they_are_read_from_the_folder_of_the_run(self, tmp_path: Path, state: str) -> None:
        (tmp_path / state).parent.mkdir(exist_ok=True)
        (tmp_path / state).write_text(json.dumps({"global_step": 2, "log_history": []}))
        (tmp_path / "settings.json").write_text(json.dumps({"seed": 7}))
        assert settings_of(load_run(tmp_path, "a")) == {"seed": 7}
