"""What the stability benchmark concludes from its runs, against values worked by hand and by brute force."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import pytest
from benchmarks.stability_report import make_rows
from benchmarks.stability_statistics import (
    Run,
    bootstrap_interval,
    choosing_plan,
    chosen_rate,
    paired,
    sign_flip_test,
    summarize,
)
from hypothesis import given
from hypothesis import strategies as st

DIFFERENCES = st.lists(st.integers(-8, 8).map(lambda eighths: eighths / 8), min_size=1, max_size=7)


def record(
    *sampled: float, method: str = "grpo", seed: int = 201, rate: float = 1e-3, **changes: Any
) -> dict[str, Any]:
    """A run in `reuse` with one evaluation before training and one after each rollout; its greedy EM is 0.1 more."""
    evaluations = [{"rollout": i, "sampled_em": em, "greedy_em": em + 0.1} for i, em in enumerate(sampled)]
    where = {"regime": "reuse", "method": method, "learning_rate": rate, "seed": seed, "world": "flat"}
    rest = {"policy_parameters": 1000, "harness": 3, "evaluations": evaluations, "rollouts": [], "error": None}
    return {**where, **rest, **changes}


def row(*ems: float, **changes: Any) -> dict[str, Any]:
    """Of seeds 201, 202, …, each of which ends at its EM."""
    return summarize([Run(record(0.3, em, seed=201 + i, **changes)) for i, em in enumerate(ems)])


@given(DIFFERENCES)
def test_the_sign_flip_test_against_brute_force(differences: list[float]) -> None:
    sums = [
        abs(sum(sign * value for sign, value in zip(signs, differences, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    assert sign_flip_test(differences) == statistics.fmean(total >= abs(sum(differences)) for total in sums)
    # A third has no exact binary form: equal sums come out unequal in their last bits.
    assert sign_flip_test([-value / 3 for value in reversed(differences)]) == sign_flip_test(differences)


def test_intervals() -> None:
    assert bootstrap_interval([0.4]) is None
    assert bootstrap_interval([0.25, 0.25, 0.25]) == [0.25, 0.25]
    # A quarter of the resamples is the lower value twice, a quarter the higher.
    assert bootstrap_interval([0.2, 0.6]) == pytest.approx([0.2, 0.6])


def test_final_is_over_the_last_five_rollouts() -> None:
    ended = Run(record(0.3, 0.9, 0.9, 0.5, 0.6, 0.7, 0.4, 0.3))
    assert ended.final("sampled_em") == pytest.approx(0.5)
    assert ended.final("greedy_em") == pytest.approx(0.6)
    assert Run(record(0.3, 0.6, 0.8)).final("sampled_em") == pytest.approx(0.7)  # the start is no part of it


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
def test_collapse(sampled: tuple[float, ...], collapsed: bool) -> None:
    assert Run(record(*sampled)).collapsed is collapsed


@pytest.mark.parametrize("sampled", [(), (0.3,), (0.3, 0.6, 0.7)])
def test_a_run_that_died_has_collapsed_at_zero(sampled: tuple[float, ...]) -> None:
    died = Run(record(*sampled, error="weights are NaN"))
    assert (died.final("sampled_em"), died.final("greedy_em"), died.collapsed) == (0.0, 0.0, True)


def test_differences_are_paired_by_seed_within_a_harness() -> None:
    found = paired(row(0.5, 0.75, 1.0), row(0.25, 0.25))
    assert found is not None
    assert (found["seeds"], found["mean"], found["p"]) == ([201, 202], 0.375, 0.5)
    assert paired(row(0.5), row(0.25, harness=1)) is None
    assert paired(row(0.5), None) is None


class TestChoosing:
    RATES = (1e-4, 3e-4, 1e-3)

    def runs(self, finals: dict[float, tuple[float, ...]]) -> list[Run]:
        seeds = (101, 102)
        return [
            Run(record(0.3, em, seed=seed, rate=rate))
            for rate, ems in finals.items()
            for seed, em in zip(seeds, ems, strict=False)
        ]

    def test_the_second_seed_is_asked_about_what_was_close(self) -> None:
        plan = choosing_plan(self.runs({1e-4: (0.5,)}), "reuse", "grpo", self.RATES, (101, 102))
        assert plan == [(rate, 101) for rate in self.RATES]
        close = self.runs({1e-4: (0.6,), 3e-4: (0.55,), 1e-3: (0.2,)})
        assert choosing_plan(close, "reuse", "grpo", self.RATES, (101, 102))[3:] == [(1e-4, 102), (3e-4, 102)]

    def test_the_best_mean_is_chosen_and_of_equals_the_lowest(self) -> None:
        finals = {1e-4: (0.5, 0.5), 3e-4: (0.55, 0.45), 1e-3: (0.2,)}
        assert chosen_rate(self.runs(finals), "reuse", "grpo", self.RATES, (101, 102)) == 1e-4
        assert chosen_rate(self.runs(finals | {3e-4: (0.55,)}), "reuse", "grpo", self.RATES, (101, 102)) is None


class TestRows:
    def test_new_runs_replace_the_row_of_earlier_ones_that_has_no_other_seeds(self) -> None:
        earlier = make_rows([record(0.3, 0.4), record(0.3, 0.8, seed=202, method="s_grpo")], [])
        again = make_rows([record(0.3, 0.6), record(0.3, 0.5, method="s_grpo")], earlier)
        assert [(each["method"], each["seeds"], each["sampled_em"]) for each in again] == [
            ("grpo", [201], 0.6),
            ("s_grpo", [202], 0.8),
        ]
        assert make_rows([], again) == again

    def test_a_method_stands_beside_grpo_at_the_same_and_at_its_own_rate(self) -> None:
        finals = {1e-4: 0.75, 3e-4: 0.5, 1e-3: 0.25}
        choosing = [record(0.3, em, seed=101, rate=rate) for rate, em in finals.items()]
        judging = [record(0.3, 0.25), record(0.3, 0.75, rate=1e-4), record(0.3, 0.5, method="sequence")]
        rows = {(each["method"], each["tuned"]): each for each in make_rows([*choosing, *judging], [])}
        assert rows["grpo", True]["learning_rate"] == 1e-4
        assert rows["sequence", False]["difference"]["mean"] == 0.25
        assert rows["sequence", False]["difference_to_tuned_baseline"]["mean"] == -0.25
