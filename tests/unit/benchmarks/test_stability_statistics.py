"""What the stability benchmark concludes from its runs, against values worked by hand and by brute force."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
from benchmarks.seed_statistics import bootstrap_interval, paired, sign_flip_test
from benchmarks.stability_statistics import (
    INFINITE,
    Run,
    choose_learning_rates,
    choosing_plan,
    judged,
    number,
    published_grid,
    read_runs,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.benchmarks.runs import GRID, a_record, choosing, evaluations, records

DIFFERENCES = st.lists(st.integers(-8, 8).map(lambda eighths: eighths / 8), min_size=1, max_size=7)


def run(*sampled: float, every: int = 1, **changes: Any) -> Run:
    return Run({**a_record(), "evaluations": evaluations(*sampled, every=every), **changes})


class TestSignFlipTest:
    def test_five_seeds_that_agree_reach_the_smallest_p(self) -> None:
        assert sign_flip_test([0.1, 0.2, 0.1, 0.3, 0.2]) == 2 / 32

    def test_by_hand(self) -> None:
        # Of ±3 ±1 the sums are ±4 and ±2: all four are at least 2 from 0.
        assert sign_flip_test([3.0, -1.0]) == 1.0
        assert sign_flip_test([3.0, 1.0]) == 0.5

    def test_no_difference(self) -> None:
        assert sign_flip_test([0.0, 0.0, 0.0]) == 1.0

    @given(DIFFERENCES)
    def test_against_brute_force(self, differences: list[float]) -> None:
        sums = [
            abs(sum(sign * value for sign, value in zip(signs, differences, strict=True)))
            for signs in itertools.product((1, -1), repeat=len(differences))
        ]
        assert sign_flip_test(differences) == statistics.fmean(total >= abs(sum(differences)) for total in sums)

    @given(DIFFERENCES)
    def test_order_sign_and_scale_change_nothing(self, differences: list[float]) -> None:
        # A third has no exact binary form: equal sums come out unequal in their last bits.
        assert sign_flip_test([-value / 3 for value in reversed(differences)]) == sign_flip_test(differences)

    @pytest.mark.parametrize("count", [0, 21])
    def test_the_number_of_pairs_is_checked(self, count: int) -> None:
        with pytest.raises(ValueError, match=f"`differences` has {count} entries; 1 to 20"):
            sign_flip_test([0.1] * count)


class TestBootstrapInterval:
    def test_constant_data_have_no_spread(self) -> None:
        assert bootstrap_interval([0.25, 0.25, 0.25]) == [0.25, 0.25]

    def test_one_seed_has_no_interval(self) -> None:
        assert bootstrap_interval([0.4]) is None

    def test_two_seeds(self) -> None:
        # A quarter of the resamples is the lower value twice, a quarter the higher.
        assert bootstrap_interval([0.2, 0.6]) == pytest.approx([0.2, 0.6])

    def test_many_values_come_near_the_normal_interval(self) -> None:
        values = [place / 199 for place in range(200)]
        half = 1.96 * statistics.pstdev(values) / math.sqrt(200)
        assert bootstrap_interval(values) == pytest.approx([0.5 - half, 0.5 + half], abs=2e-3)

    def test_the_same_data_have_the_same_interval(self) -> None:
        assert bootstrap_interval([0.1, 0.3, 0.7]) == bootstrap_interval([0.1, 0.3, 0.7])


class TestRun:
    def test_final_is_over_the_last_five_rollouts(self) -> None:
        ended = run(0.3, 0.9, 0.9, 0.5, 0.6, 0.7, 0.4, 0.3)
        assert ended.final("sampled_em") == pytest.approx(0.5)
        assert ended.final("greedy_em") == pytest.approx(0.6)
        assert ended.best == 0.9

    def test_final_skips_what_was_evaluated_before_them(self) -> None:
        assert run(0.3, 0.9, 0.5, every=5).final("sampled_em") == 0.5

    def test_the_start_is_no_part_of_the_final(self) -> None:
        assert run(0.3, 0.6, 0.8).final("sampled_em") == pytest.approx(0.7)

    @pytest.mark.parametrize(
        ("sampled", "collapsed"),
        [
            ((0.3, 0.4, 0.3), False),
            ((0.3, 0.3, 0.28), True),  # below the start
            ((0.1, 0.8, *[0.41] * 5), False),
            ((0.1, 0.8, *[0.39] * 5), True),  # above the start, below half of the best
            ((0.4, *[0.4] * 5), False),  # as it began
        ],
    )
    def test_collapse(self, sampled: tuple[float, ...], collapsed: bool) -> None:
        assert run(*sampled).collapsed is collapsed

    @pytest.mark.parametrize("sampled", [(), (0.3,), (0.3, 0.6, 0.7)])
    def test_a_run_that_died_has_collapsed_at_zero(self, sampled: tuple[float, ...]) -> None:
        died = run(*sampled, error="weights are NaN")
        assert (died.final("sampled_em"), died.final("greedy_em"), died.collapsed) == (0.0, 0.0, True)
        assert died.best == max(sampled, default=0.0)

    def test_metric_leaves_out_what_is_not_a_number(self) -> None:
        figures = [{"x": 1.0}, {"x": None}, {}, {"x": math.nan}, {"x": "inf"}, {"x": 1e308}]
        assert run(rollouts=figures).metric("x") == [1.0, math.inf, math.inf]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, None), ("nan", None), (0, 0.0), (-2.5, -2.5), (1e307, 1e307), ("inf", math.inf), (-INFINITE, -math.inf)],
)
def test_number(value: float | str | None, expected: float | None) -> None:
    assert number(value) == expected


class TestReadRuns:
    def test_runs_are_in_the_order_of_seeds(self) -> None:
        assert [run.seed for run in read_runs(reversed(records("grpo", (0.5, 0.5, 0.5))), GRID)] == [11, 12, 13]

    @pytest.mark.parametrize(("field", "value"), [("regime", "windy"), ("method", "dpo"), ("seed", 7)])
    def test_what_is_not_in_the_grid_is_refused(self, field: str, value: object) -> None:
        with pytest.raises(ValueError, match=rf"`{field}` is {value!r}; allowed are \["):
            read_runs([{**a_record(), field: value}], GRID)

    def test_a_run_is_there_once(self) -> None:
        twin = {**a_record(), "learning_rate": 0.1 * 0.1 * 0.1}
        with pytest.raises(ValueError, match=r"two runs of \('calm', 'grpo', 0.001\) with seed 11"):
            read_runs([a_record(), twin], GRID)

    @pytest.mark.parametrize("asked", [[], evaluations(0.3), evaluations(0.3, 0.5)[1:]])
    def test_evaluations_before_and_after_training_are_needed(self, asked: list[dict[str, float]]) -> None:
        with pytest.raises(ValueError, match="rollout 0 and at least one later are needed"):
            read_runs([{**a_record(), "evaluations": asked}], GRID)

    def test_a_run_that_died_may_lack_them(self) -> None:
        assert read_runs([{**a_record(), "evaluations": [], "error": "NaN"}], GRID)[0].collapsed


class TestChooseLearningRates:
    def test_the_highest_mean_wins(self) -> None:
        made = choosing("grpo", {3e-4: (0.45, 0.6), 1e-3: (0.5, 0.2)})
        assert choose_learning_rates(made, GRID) == {("calm", "grpo"): 3e-4}

    def test_a_clear_first_seed_is_enough(self) -> None:
        made = choosing("grpo", {3e-4: (0.4, 0.9), 1e-3: (0.7, 0.2)})
        assert choose_learning_rates(made, GRID) == {("calm", "grpo"): 1e-3}
        first_only = [record for record in made if record["seed"] == 1]
        assert choose_learning_rates(first_only, GRID) == {("calm", "grpo"): 1e-3}

    def test_what_is_out_of_the_question_does_not_come_back(self) -> None:
        made = choosing("grpo", {1e-4: (0.39, 0.9), 3e-4: (0.45, 0.4), 1e-3: (0.5, 0.4)})
        assert choose_learning_rates(made, GRID) == {("calm", "grpo"): 1e-3}

    def test_of_equals_the_lowest(self) -> None:
        # Both means are 0.15; in floating point the second comes out larger.
        made = choosing("grpo", {3e-4: (0.15, 0.15), 1e-3: (0.1, 0.2)})
        assert choose_learning_rates(made, GRID) == {("calm", "grpo"): 3e-4}

    def test_judging_runs_have_no_say(self) -> None:
        made = choosing("grpo", {3e-4: (0.4, 0.4), 1e-3: (0.5, 0.5)})
        made += records("grpo", (0.9, 0.9, 0.9), rate=3e-4)
        assert choose_learning_rates(made, GRID) == {("calm", "grpo"): 1e-3}

    def test_each_regime_and_method_chooses_for_itself(self) -> None:
        made = choosing("grpo", {3e-4: (0.4, 0.4), 1e-3: (0.5, 0.5)})
        made += choosing("ppo", {1.5e-4: (0.4, 0.4), 5e-4: (0.3, 0.3)}, regime="wild")
        assert choose_learning_rates(made, GRID) == {("calm", "grpo"): 1e-3, ("wild", "ppo"): 1.5e-4}

    def test_no_choice_from_an_incomplete_grid(self) -> None:
        complete = choosing("grpo", {3e-4: (0.45, 0.4), 1e-3: (0.5, 0.5)})
        for absent in range(len(complete)):
            assert choose_learning_rates([*complete[:absent], *complete[absent + 1 :]], GRID) == {}

    def test_a_learning_rate_beyond_the_grid_may_win(self) -> None:
        made = choosing("grpo", {1e-4: (0.8, 0.8), 3e-4: (0.4, 0.4), 1e-3: (0.5, 0.5)})
        assert choose_learning_rates(made, GRID) == {("calm", "grpo"): 1e-4}


class TestChoosingPlan:
    def plan(self, made: list[dict[str, Any]]) -> list[tuple[float, int]]:
        return choosing_plan(read_runs(made, GRID), GRID, "calm", "grpo")

    def test_the_first_seed_tries_all(self) -> None:
        assert self.plan([]) == [(3e-4, 1), (1e-3, 1)]
        assert self.plan([a_record("grpo", 1, 0.5, rate=1e-3)]) == [(3e-4, 1), (1e-3, 1)]

    def test_the_second_what_is_close(self) -> None:
        firsts = [a_record("grpo", 1, em, rate=rate) for rate, em in ((3e-4, 0.41), (1e-3, 0.5))]
        assert self.plan(firsts) == [(3e-4, 1), (1e-3, 1), (3e-4, 2), (1e-3, 2)]

    def test_and_nothing_where_nothing_is(self) -> None:
        firsts = [a_record("grpo", 1, em, rate=rate) for rate, em in ((3e-4, 0.39), (1e-3, 0.5))]
        assert self.plan(firsts) == [(3e-4, 1), (1e-3, 1)]

    def test_a_control_chooses_nothing(self) -> None:
        assert choosing_plan([], replace(GRID, choosing_seeds=()), "calm", "grpo") == []


def test_a_learning_rate_that_has_no_end_is_found_again() -> None:
    grid = replace(GRID, choices={"calm": (1e-3 / 3, 1e-3), "wild": ()})
    assert grid.learning_rates("calm") == [0.000333, 0.001]
    made = choosing("grpo", {0.000333: (0.4, 0.4), 1e-3: (0.3, 0.3)})
    assert choose_learning_rates(made, grid) == {("calm", "grpo"): 0.000333}


def test_judged_keeps_choosing_runs_out() -> None:
    made = choosing("grpo", {3e-4: (0.6, 0.6), 1e-3: (0.5, 0.2)}) + records("grpo", (0.5, 0.6))
    made += records("grpo", (0.7,), rate=3e-4)
    tables = judged(read_runs(made, GRID), GRID)
    assert [run.seed for run in tables["calm", False]["grpo"]] == [11, 12]
    assert [run.seed for run in tables["calm", True]["grpo"]] == [11]
    assert tables["wild", False] == tables["wild", True] == {}


class TestPaired:
    def test_by_hand(self) -> None:
        better, baseline = (
            read_runs(records(*made), GRID) for made in (("so_grpo", (0.6, 0.5)), ("grpo", (0.4, 0.4)))
        )
        found = paired(better, baseline)
        assert found is not None
        assert (found["seeds"], found["p"]) == ([11, 12], 0.5)
        assert found["mean"] == pytest.approx(0.15)
        assert found["interval"] == pytest.approx([0.1, 0.2])

    def test_only_seeds_of_both(self) -> None:
        found = paired(read_runs(records("so_grpo", (0.6, 0.5)), GRID), read_runs([a_record(seed=12)], GRID))
        assert found == {"seeds": [12], "mean": 0.0, "interval": None, "p": 1.0}

    def test_no_baseline(self) -> None:
        assert paired(read_runs([a_record()], GRID), []) is None

    def test_runs_of_two_harnesses_are_no_pair(self) -> None:
        ours, others = records("so_grpo", (0.6, 0.5)), records("grpo", (0.5, 0.5))
        others[1]["harness"] = 1
        found = paired(read_runs(ours, GRID), read_runs(others, GRID))
        assert found is not None and found["seeds"] == [11]


def test_the_published_grid() -> None:
    grid = published_grid()
    assert not set(grid.choosing_seeds) & set(grid.judging_seeds)
    assert len(set(grid.judging_seeds)) >= 5
    assert grid.regimes.keys() == grid.common_learning_rate.keys()
    assert {method.family for method in grid.methods.values()} == {"grpo", "ppo"} <= grid.methods.keys()
    rates = {regime: grid.learning_rates(regime) for regime in grid.regimes}
    assert all(grid.common(regime) in of_regime for regime, of_regime in rates.items() if of_regime)
