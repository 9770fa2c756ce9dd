"""What a guard's actions are worth: which runs are made, and the tables of records made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.guard_actions import COMPARED, DRIVEN, format_tables, jobs
from benchmarks.stability_grid import JUDGING_SEEDS, REGIMES
from benchmarks.stability_methods import METHODS
from benchmarks.stability_run import Job, settings_of
from benchmarks.stability_statistics import Run

from tests.unit.benchmarks.runs import a_record, evaluations


def runs(method: str, ems: Sequence[float]) -> dict[Job, dict[str, Any]]:
    rate = REGIMES["reuse"].learning_rate
    return {
        Job("reuse", method, rate, seed): a_record(method, seed, em, "reuse", rate)
        for seed, em in zip(JUDGING_SEEDS, ems, strict=False)
    }


def test_every_method_runs_on_every_judging_seed() -> None:
    found = list(jobs())
    assert len(found) == len(set(found)) == len(JUDGING_SEEDS) * len(DRIVEN) * len(COMPARED)
    assert {job.seed for job in found[: len(DRIVEN) * len(COMPARED)]} == {JUDGING_SEEDS[0]}


def test_the_table_has_means_collapses_stops_and_gains() -> None:
    records = runs("grpo", [0.2, 0.4]) | runs("grpo_roll_back", [0.4, 0.8])
    stopped = records[Job("reuse", "grpo_roll_back", REGIMES["reuse"].learning_rate, JUDGING_SEEDS[0])]
    stopped["stopped_at"] = 2
    rows = [line for line in format_tables(records).splitlines() if line.startswith("| GRPO")]
    assert rows == [
        "| GRPO | 0.300³ | 0.400 | 1 of 2 | 0 |  |",
        "| GRPO, guard: roll_back | 0.600³ | 0.700 | 0 of 2 | 1 | +0.300 [+0.200, +0.400] (2) |",
    ]


def test_a_stopped_run_counts_with_the_policy_that_it_left() -> None:
    record = a_record()
    record["evaluations"] = evaluations(0.3, 0.8, 0.1)
    assert Run(record).final("sampled_em") == 0.45
    assert Run(record | {"stopped_at": 2}).final("sampled_em") == 0.1


def test_a_guard_is_a_setting_of_its_run() -> None:
    plain, guarded = (settings_of(Job("reuse", method, 1e-3, 201)) for method in ("grpo_target", "grpo_lower_lr"))
    assert guarded.endswith("'lower_lr')")
    assert "max_interventions=3" in guarded
    assert "high_kl" in guarded
    assert "lower_lr" not in plain
    assert not METHODS["grpo"].guard
