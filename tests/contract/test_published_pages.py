"""The pages of `benchmarks/results` are those that the commands would write from the archives."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import defaults_report, guard_actions, stability, stability_trials, turn_length
from benchmarks.stability_texts import HEADER
from benchmarks.turn_length_grid import SETTINGS
from benchmarks.turn_length_report import length_rows, table


@pytest.fixture(autouse=True)
def no_runs_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stability, "RUNS", tmp_path)


def test_what_the_stability_report_says_beside_its_tables() -> None:
    page = (stability.RESULTS / "stability.md").read_text()
    constant = [paragraph for paragraph in HEADER.split("\n\n") if "{" not in paragraph]
    assert len(constant) > 3
    assert [paragraph for paragraph in constant if paragraph.strip() not in page] == []
    assert stability.READING.read_text().strip() in page


def test_the_trials() -> None:
    assert stability_trials.TABLE.read_text() == stability_trials.format_tables(stability_trials.load())


def test_the_guards_actions() -> None:
    assert guard_actions.TABLE.read_text() == guard_actions.format_tables(guard_actions.load())


def test_the_lengths_of_turns() -> None:
    assert table(length_rows(turn_length.load(), SETTINGS)) in (stability.RESULTS / "turn_length.md").read_text()


def test_what_the_defaults_rest_on() -> None:
    assert defaults_report.PAGE.read_text() == defaults_report.page()
