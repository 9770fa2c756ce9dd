"""What the stability benchmark's pictures draw."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from benchmarks.stability_figures import (
    BASELINE,
    KL_SHOWN,
    PANELS,
    PER_ROW,
    colour_of,
    draw_regime,
    draw_summary,
    matrix,
    rows_of_methods,
)
from benchmarks.stability_statistics import Run

from tests.unit.benchmarks.runs import GRID, a_record, evaluations

EM, REWARD, _, KL = PANELS
NAMES = ("grpo", *"abcdefg", "ppo", "h")
MANY = replace(
    GRID,
    methods={
        name: SimpleNamespace(title=name.upper(), family="ppo" if name in ("ppo", "h") else "grpo", drawn=True)
        for name in NAMES
    },
)


def run(**changes: Any) -> Run:
    return Run({**a_record(), **changes})


class TestMatrix:
    def test_evaluations_begin_before_training_and_rewards_at_rollout_one(self) -> None:
        runs = [run(evaluations=evaluations(0.3, 0.5, every=4)), run(evaluations=evaluations(0.2, 0.6, every=4))]
        rollouts, values = matrix(runs, EM)
        assert (rollouts, values.tolist()) == ([0, 4], [[0.3, 0.5], [0.2, 0.6]])
        assert matrix(runs, REWARD)[0] == [1, 2]

    def test_a_run_that_died_is_at_zero_from_then_on(self) -> None:
        runs = [run(evaluations=evaluations(0.3, 0.5, 0.6)), run(evaluations=evaluations(0.2), error="NaN")]
        assert matrix(runs, EM)[1].tolist() == [[0.3, 0.5, 0.6], [0.2, 0.0, 0.0]]

    def test_other_figures_of_it_are_absent(self) -> None:
        runs = [run(), run(rollouts=[{"reward": 0.1}], error="NaN")]
        np.testing.assert_equal(matrix(runs, REWARD)[1], [[0.5, 0.5], [0.1, np.nan]])

    def test_the_kl_is_clamped(self) -> None:
        values = matrix([run(rollouts=[{"kl_to_old": kl} for kl in (0.01, -1e-9, "inf")])], KL)[1]
        assert values[0] == pytest.approx([-2, *np.log10(KL_SHOWN)])

    def test_nothing_measured(self) -> None:
        assert matrix([run(rollouts=[])], KL)[0] == []


class TestRowsOfMethods:
    def test_families_are_apart_and_rows_are_fair(self) -> None:
        rows = rows_of_methods({name: [] for name in NAMES}, MANY)
        assert rows == [
            ("grpo", ["grpo", "a", "b", "c"]),
            ("grpo", ["grpo", "d", "e", "f", "g"]),
            ("ppo", ["ppo", "h"]),
        ]

    @pytest.mark.parametrize(
        ("present", "expected"),
        [(["grpo"], [("grpo", ["grpo"])]), (["h"], [("ppo", ["h"])]), ([], [])],
    )
    def test_what_has_not_run_is_left_out(self, present: list[str], expected: list[tuple[str, list[str]]]) -> None:
        assert rows_of_methods({name: [] for name in present}, MANY) == expected


def test_colours_differ_within_a_family_and_baselines_are_black() -> None:
    of_family = [colour_of(name, MANY) for name in NAMES if MANY.methods[name].family == "grpo"]
    assert of_family[0] == colour_of("ppo", MANY) == BASELINE
    assert len(set(of_family)) == len(of_family) > PER_ROW


def test_pictures_of_all_that_can_happen(tmp_path: Path) -> None:
    died = run(evaluations=[], rollouts=[], error="NaN")
    table = {"grpo": [run(), run(seed=12)], "a": [died], "h": [run(rollouts=[{"kl_to_old": "inf", "reward": None}])]}
    draw_regime(table, MANY, "Calm", tmp_path / "regime.png")
    draw_summary({"calm": table, "wild": {"a": [died]}}, MANY, tmp_path / "summary.png")
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("regime.png", "summary.png"))
