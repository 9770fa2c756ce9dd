"""Alarms of recorded runs and the thresholds that are fitted on them, with records made by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from benchmarks.guard_curve import Tables, achieved, curve
from benchmarks.guard_fit import (
    Outcomes,
    Template,
    count,
    fate,
    first_alarms,
    fit_set,
    history,
    log_history,
    onset,
    watch,
)
from benchmarks.guard_templates import BY_HAND, FITTED, SHAPES, THRESHOLDS, own_shape, template, with_thresholds
from benchmarks.stability_statistics import Run

from sorl_trl.diagnostics import DEFAULT_RULES, Level, detect
from tests.unit.benchmarks.runs import a_record, evaluations

NEVER = math.inf


def a_run(em: float = 0.5, **metrics: Sequence[Any]) -> Run:
    """With a value of each metric for each rollout."""
    rollouts = [dict(zip(metrics, values, strict=True)) for values in zip(*metrics.values(), strict=True)]
    return Run(a_record(em=em) | {"rollouts": rollouts})


def kl(*values: Any, em: float = 0.5) -> Run:
    return a_run(em, kl_to_old=values, reward=[0.5] * len(values))


def outcomes(fates: Sequence[str], onsets: Sequence[float]) -> Outcomes:
    return Outcomes([], np.array(fates), np.array(onsets, dtype=float))


class TestOnset:
    def test_is_where_rewards_fall_below_the_first(self) -> None:
        # Means of three, from the one that ends with rollout 2 on: .5, .53, .5, .3, .1.
        assert onset(a_run(reward=[0.5, 0.5, 0.5, 0.6, 0.4, -0.1, 0.0])) == 5

    def test_is_where_rewards_fall_below_half_of_the_best(self) -> None:
        # The mean of the last three is .43 after rollout 7.
        assert onset(a_run(reward=[0.1, 0.1, 0.1, 0.9, 0.9, 0.9, 0.2, 0.2, 0.2])) == 7

    def test_lasts_to_the_end(self) -> None:
        assert onset(a_run(reward=[0.5, 0.5, 0.5, 0.0, 0.0, 0.0, 0.9, 0.9, 0.9])) == 9


@pytest.mark.parametrize(
    ("ems", "expected"), [((0.3, 0.8, 0.2), "collapsed"), ((0.3, 0.8, 0.5), "damaged"), ((0.3, 0.8, 0.8), "healthy")]
)
def test_fate(ems: tuple[float, ...], expected: str) -> None:
    assert fate(Run(a_record() | {"evaluations": evaluations(*ems, every=10)})) == expected


class TestFirstAlarms:
    def test_at_every_threshold(self) -> None:
        rule = Template(lambda t: Level("kl", "kl_to_old", "", threshold=t, patience=2), (0.1, 0.2, 0.4))
        table = first_alarms(rule, [kl(0.1, 0.1, 0.3, 0.3, 0.0), kl(0.0, 0.5, 0.0, 0.5, 0.5)])
        assert table.tolist() == [[2, 5], [4, 5], [NEVER, 5]]

    @pytest.mark.parametrize("name", FITTED)
    def test_are_those_of_the_guard(self, name: str) -> None:
        draw = np.random.default_rng(0)
        metric = template(name, own_shape(name)).rule(THRESHOLDS[name][0]).metric
        values: list[Any] = draw.exponential(0.5, 25).round(2).tolist()
        values[3], values[9] = None, 1e308
        masked = [1.0 if i in (5, 12) else 0.0 for i in range(25)]
        metrics = {"reward": draw.exponential(0.5, 25).tolist(), metric: values, "trajectories_without_turn": masked}
        run = a_run(**metrics)
        one = template(name, own_shape(name))
        table = first_alarms(one, [run])
        assert len({float(step) for step in table[:, 0]}) > 1
        for row, threshold in zip(table, one.thresholds, strict=True):
            rule = one.rule(threshold)
            assert row[0] == watch([rule], [run])[rule.name][0], threshold

    def test_masked_and_absent_rollouts_are_not_judged(self) -> None:
        run = a_run(kl_to_old=[0.1, None, 0.3, "inf"], trajectories_without_turn=[0.0, 0.0, 1.0, 0.0])
        assert history(run, "kl_to_old") == ([0, 3], [0.1, NEVER])
        assert history(run, "trajectories_without_turn") == ([0, 1, 2, 3], [0.0, 0.0, 1.0, 0.0])


def test_an_alarm_comes_with_the_next_rollout() -> None:
    run = kl(0.0, 0.5, 0.0)
    rule = Level("kl", "kl_to_old", "", threshold=0.4)
    (alarm,) = detect(log_history(run), [rule])
    assert alarm.step == 2
    assert watch([rule], [run])["kl"].tolist() == [2]


class TestFitSet:
    FATES = outcomes(["collapsed", "collapsed", "healthy", "healthy"], [5, 5, 9, 9])

    def fit(self, budget: float, fixed: Sequence[float] = (NEVER,) * 4, **tables: Any) -> dict[str, int | None]:
        found = {name: np.array(table, dtype=float) for name, table in tables.items()}
        return fit_set(found, np.array(fixed), self.FATES, budget)

    def test_catches_most_within_the_budget(self) -> None:
        table = [[6, 6, 6, 6], [6, 6, 6, NEVER], [6, NEVER, NEVER, NEVER]]
        assert self.fit(0.0, kl=table) == {"kl": 2}
        assert self.fit(0.5, kl=table) == {"kl": 1}

    def test_pays_for_alarms_before_the_beginning(self) -> None:
        table = [[3, 3, 3, NEVER], [6, 6, NEVER, NEVER]]
        assert self.fit(0.5, kl=table) == {"kl": 0}
        assert self.fit(0.0, kl=table) == {"kl": 1}

    def test_spends_false_alarms_where_they_catch_more(self) -> None:
        # Two healthy runs may have an alarm; each rule is named by what it catches and how many it would alarm.
        found = outcomes(["collapsed"] * 7 + ["healthy"] * 4, [5] * 11)
        caught = {"three_for_two": ([0, 1, 2], [7, 8]), "two": ([3, 4], [9]), "two_more": ([5, 6], [10])}
        tables = {name: np.full((1, 11), NEVER) for name in caught}
        for name, (collapsed, healthy) in caught.items():
            tables[name][0, [*collapsed, *healthy]] = 6
        chosen = fit_set(tables, np.full(11, NEVER), found, 0.5)
        assert chosen == {"three_for_two": None, "two": 0, "two_more": 0}

    def test_counts_the_false_alarms_of_the_set_once(self) -> None:
        assert self.fit(0.5, a=[[6, NEVER, 6, NEVER]], b=[[NEVER, 6, 6, NEVER]]) == {"a": 0, "b": 0}

    def test_counts_those_of_rules_without_a_threshold(self) -> None:
        fixed = (NEVER, NEVER, NEVER, 2)
        assert self.fit(0.5, fixed, kl=[[6, 6, 6, NEVER], [6, NEVER, NEVER, NEVER]]) == {"kl": 1}

    def test_pays_nothing_for_what_those_have_caught(self) -> None:
        assert self.fit(0.5, (2, NEVER, NEVER, NEVER), kl=[[6, NEVER, 6, NEVER]]) == {"kl": None}

    def test_adds_what_costs_nothing(self) -> None:
        tables = {"a": [[6, 6, 6, NEVER]], "b": [[6, 6, 6, 6], [7, 7, 7, NEVER], [NEVER] * 4]}
        assert self.fit(0.5, **tables) == {"a": 0, "b": 1}


def test_counts() -> None:
    found = outcomes(["collapsed", "collapsed", "collapsed", "healthy", "damaged"], [5, 5, 5, 9, 9])
    done = count(np.array([4, 5, NEVER, 1, 1]), found)
    assert (done.caught, done.early, done.false, done.score) == (2, 1, 1, 3)


class TestAchieved:
    FATES = outcomes(["collapsed"] * 4 + ["healthy"] * 2, [5, 5, 5, 5, 9, 9])

    def test_shares_and_lead(self) -> None:
        found = achieved(np.array([3, 4, 7, NEVER, 2, NEVER]), self.FATES)
        values = {name: estimate["value"] for name, estimate in found.items()}
        assert values == {"caught": 0.75, "early": 0.5, "in_time": 0.25, "median_lead": 1.0, "false_alarms": 0.5}
        low, high = found["caught"]["interval"]
        assert 0.0 <= low < 0.75 < high <= 1.0
        assert found["median_lead"]["interval"] == [-2.0, 2.0]

    def test_of_nothing(self) -> None:
        found = achieved(np.full(6, NEVER), self.FATES)
        assert found["median_lead"] is None
        assert achieved(np.full(0, NEVER), outcomes([], []))["caught"] is None


def test_the_curve_fits_here_and_judges_there() -> None:
    fits = outcomes(["collapsed", "healthy"], [5, 9])
    judges = outcomes(["collapsed", "healthy"], [5, 9])
    names = ("reward_fall", "high_kl", "entropy_growth")
    here = {name: np.array([[3, 3], [6, NEVER]]) for name in names}
    there = {name: np.array([[3, 3], [NEVER, 4]]) for name in names}
    nothing = np.full(2, NEVER)
    limits = dict.fromkeys(names, (0.1, 0.2))
    rows = list(curve(Tables(here, nothing, fits), Tables(there, nothing, judges), limits))
    assert len(rows) == 4 * 7
    assert rows[7]["rules"] == "reward_fall"
    assert rows[7]["thresholds"] == {"reward_fall": 0.2}
    assert (rows[7]["caught"]["value"], rows[7]["false_alarms"]["value"]) == (0.0, 1.0)


class TestTemplates:
    def test_thresholds_ascend_or_descend_to_what_fires_least(self) -> None:
        for name in FITTED:
            limits = list(THRESHOLDS[name])
            assert limits == sorted(limits, reverse=name == "reward_fall")
            assert all(limit == float(f"{limit:.2g}") for limit in limits)
            assert own_shape(name) in SHAPES[name]

    def test_by_hand_changes_thresholds_alone(self) -> None:
        rules = {rule.name: rule for rule in with_thresholds(BY_HAND)}
        assert {name: getattr(rules[name], field) for name, field in FITTED.items()} == BY_HAND
        assert [rule.metric for rule in rules.values()] == [rule.metric for rule in DEFAULT_RULES]
        assert rules["searches_fall"] in DEFAULT_RULES
