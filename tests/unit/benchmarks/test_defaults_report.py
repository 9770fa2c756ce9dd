from __future__ import annotations

import math
from typing import Any

import pytest
from benchmarks import defaults_report as report
from benchmarks.stability_statistics import Run

from tests.unit.benchmarks.runs import GRID, a_record, records


def runs_of(*some: list[dict[str, Any]]) -> report.By:
    return report.judging_runs([Run(record) for of_method in some for record in of_method], GRID)


def test_only_pairs_of_one_harness_count() -> None:
    ours, baseline = records("so_grpo", (0.7, 0.8, 0.6)), records("grpo", (0.5, 0.7, 0.9))
    baseline[2]["harness"] = 1
    found = report.differences(runs_of(ours, baseline), "calm", ("so_grpo", "grpo"), "sampled_em")
    assert found == pytest.approx([0.2, 0.1])


def test_neither_choosing_runs_nor_other_learning_rates_count() -> None:
    others = [a_record("so_grpo", seed=1), a_record("so_grpo", seed=11, rate=3e-4)]
    assert runs_of(others) == {}


def test_the_standard_error_is_that_of_a_mean() -> None:
    assert report.standard_error([0.1, 0.2, 0.3, 0.4]) == pytest.approx(math.sqrt(0.05 / 3 / 4))
    assert report.standard_error([0.1]) == math.inf


def test_a_row_has_each_regime_that_was_judged_and_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "CONTRASTS", (("so_grpo", "grpo"), ("so_grpo", "ppo")))
    wild = [records(name, (em,), "wild", 5e-4) for name, em in (("so_grpo", 0.9), ("grpo", 0.5))]
    runs = runs_of(records("so_grpo", (0.7, 0.9)), records("grpo", (0.6, 0.6)), *wild)
    header, rows = report.contrast_rows(runs, GRID, "greedy_em")
    assert header == ["", "Calm", "Wild", "all pairs"]
    assert rows == [["SO-GRPO − GRPO", "+0.200 ± 0.100 (2, p 0.5)", "+0.400 (1)", "+0.267 ± 0.088 (3, p 0.25)"]]


def test_harnesses_are_compared_run_by_run() -> None:
    now, before = records("grpo", (0.5, 0.7)), records("grpo", (0.6, 0.7, 0.9))
    lines = list(report.harness_lines([Run(record) for record in before], runs_of(now)))
    assert lines == ["- 2 runs that harness 1 evaluated, made again with harness 3: -0.050 ± 0.050."]


def test_the_page_of_the_archived_runs() -> None:
    """What is published is what the archives say; every contrast names rows of the benchmark."""
    grid = report.published_grid()
    assert {name for contrast in report.CONTRASTS for name in contrast} <= {*grid.methods}
    replaced = [*map(Run, report.read_archive(report.REPLACED))]
    assert len(replaced) == 30 and {run.harness for run in replaced} == {1}
