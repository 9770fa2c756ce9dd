from __future__ import annotations

from typing import Any

import pytest
from benchmarks import defaults_report as report
from benchmarks.stability_statistics import Run

from tests.unit.benchmarks.runs import GRID, a_record, records

CONTRAST = ("so_grpo", "grpo")


def runs_of(*some: list[dict[str, Any]]) -> list[Run]:
    return report.judging_runs([Run(record) for of_method in some for record in of_method], GRID)


def test_only_pairs_of_one_harness_count() -> None:
    ours, baseline = records("so_grpo", (0.7, 0.8, 0.6)), records("grpo", (0.5, 0.7, 0.9))
    baseline[2]["harness"] = 1
    found = report.differences(runs_of(ours, baseline), CONTRAST, "calm", "sampled_em")
    assert found == {("flat", 11): [pytest.approx(0.2)], ("flat", 12): [pytest.approx(0.1)]}


def test_neither_choosing_runs_nor_other_learning_rates_count() -> None:
    others = [a_record("so_grpo", seed=1), a_record("so_grpo", seed=11, rate=3e-4)]
    assert runs_of(others) == []


def test_a_cell_is_of_the_means_of_clusters() -> None:
    assert report.cell({}) == "–"
    assert report.cell({("flat", 11): [0.1, 0.3]}) == "+0.200 (1)"
    # Means .2 and .4: their standard deviation is .1 √2, the standard error .1.
    assert report.cell({("flat", 11): [0.1, 0.3], ("flat", 12): [0.4]}) == "+0.300 ± 0.100 (2, p 0.5)"


def test_a_world_of_a_seed_counts_once_over_all_regimes() -> None:
    parts = [{("flat", 11): [0.1]}, {("flat", 11): [0.3], ("flat", 12): [0.5]}, {("high", 11): [0.7]}]
    assert report.merged(parts) == {("flat", 11): [0.1, 0.3], ("flat", 12): [0.5], ("high", 11): [0.7]}


def test_a_row_has_each_regime_and_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "CONTRASTS", (CONTRAST, ("so_grpo", "ppo")))
    wild = [records(name, (em,), "wild", 5e-4) for name, em in (("so_grpo", 0.9), ("grpo", 0.5))]
    runs = runs_of(records("so_grpo", (0.7, 0.9)), records("grpo", (0.6, 0.6)), *wild)
    header, rows = report.contrast_rows(runs, GRID, "greedy_em")
    assert header == ["", "Calm", "Wild", "all, by world and seed"]
    assert rows == [
        ["SO-GRPO − GRPO", "+0.200 ± 0.100 (2, p 0.5)", "+0.400 (1)", "+0.267 ± 0.088 (3, p 0.25)"],
        ["SO-GRPO − PPO", "–", "–", "–"],  # what was not compared is seen
    ]


def test_harnesses_are_compared_run_by_run() -> None:
    now, before = records("grpo", (0.5, 0.7, 0.9)), records("grpo", (0.6, 0.7, 0.2))
    for record in before:
        record |= {"harness": 1, "settings": "these"}
    for record in now:
        record["settings"] = "these"
    before[2]["settings"] = "others"
    rows = report.harness_rows([Run(record) for record in before], runs_of(now))
    found = "-0.050 ± 0.050 (2, p 1)"
    assert rows == [["3 − 1", "all", "2", found], ["3 − 1", "`flat`", "2", found]]


def test_every_contrast_names_rows_of_the_benchmark() -> None:
    assert {name for contrast in report.CONTRASTS for name in contrast} <= {*report.published_grid().methods}
