"""The trials: which runs are made, and the tables of records made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from benchmarks.stability_grid import CHOOSING_SEEDS, JUDGING_SEEDS, REGIMES
from benchmarks.stability_run import Job, settings_of
from benchmarks.stability_trials import format_tables, is_current, jobs

from tests.unit.benchmarks.runs import a_record

FIRST, SECOND = CHOOSING_SEEDS


def cell(method: str, rate: float, ems: Sequence[float]) -> list[dict[str, Any]]:
    return [a_record(method, seed, em, "reuse", rate) for seed, em in zip(CHOOSING_SEEDS, ems, strict=False)]


def row(records: list[dict[str, Any]]) -> str:
    """The cells of the table's only row."""
    return format_tables(records).splitlines()[-1].split(" | ", 1)[1].removesuffix(" |")


def test_the_first_seeds_jobs_come_first() -> None:
    found = list(jobs(["reuse", "gentle"], ["grpo", "turn_length"], [FIRST, SECOND]))
    reuse = [Job("reuse", method, rate, FIRST) for method in ("grpo", "turn_length") for rate in (1e-4, 3e-4, 1e-3)]
    # None is chosen in gentle: its common rate.
    assert found[:8] == [*reuse, *(Job("gentle", method, 3e-4, FIRST) for method in ("grpo", "turn_length"))]
    assert [job.seed for job in found] == [FIRST] * 8 + [SECOND] * 8


def test_a_table_per_regime_with_rates_ascending() -> None:
    records = [*cell("turn_length", 1e-3, [0.5]), *cell("grpo", 1e-4, [0.4, 0.6])]
    records += [a_record("grpo", FIRST, 0.7, "stale", 3e-4)]
    lines = format_tables(records).splitlines()
    start = lines.index(f"## {REGIMES['reuse'].title}")
    assert lines[start + 2 : start + 6] == [
        "| method | 0.0001 | 0.001 |",
        "|---|---|---|",
        "| GRPO | 0.50 (0.60)³ |  |",
        "| turn, range / length |  | 0.50 (0.60)³ (one) |",
    ]
    assert f"## {REGIMES['stale'].title}" in lines
    assert f"## {REGIMES['long'].title}" not in lines


@pytest.mark.parametrize(
    ("ems", "shown"),
    [
        ([[0.4, 0.6], [0.6, 0.8], [0.5]], "0.50 (0.60)³ | **0.70 (0.80)**³ | 0.50 (0.60)³ (one)"),
        ([[0.4, 0.6], [0.3, 0.5], [0.9]], "**0.50 (0.60)**†³ | 0.40 (0.50)³ | 0.90 (1.00)³ (one)"),
        ([[0.1], [0.4], [0.5]], "0.10 (0.20)³ (one) x | 0.40 (0.50)³ (one) | **0.50 (0.60)**†³ (one)"),
    ],
    ids=["in the middle", "one seed does not beat two", "at the upper end"],
)
def test_the_best_rate(ems: list[list[float]], shown: str) -> None:
    rates = (1e-4, 3e-4, 1e-3)
    assert row([run for rate, of_rate in zip(rates, ems, strict=True) for run in cell("grpo", rate, of_rate)]) == shown


def test_a_record_made_with_other_settings_is_not_current() -> None:
    record = a_record("turn_length", FIRST, 0.5, "reuse") | {
        "settings": settings_of(Job("reuse", "turn_length", 1, 1))
    }
    assert is_current(record)
    assert not is_current(record | {"settings": "others"})
    assert not is_current(record | {"seed": JUDGING_SEEDS[0]})
    assert not is_current(record | {"method": "unheard"})
