"""The expert that thinks before it acts."""

from __future__ import annotations

from pathlib import Path

import pytest

from sorl_trl.records.evaluated import EvaluatedTrajectory
from sorl_trl.sandbox import (
    NO_NOISE,
    ThinkingWarmStart,
    World,
)

from .helpers import run_expert


@pytest.fixture(scope="module")
def practised(invented: World, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[EvaluatedTrajectory]]:
    """By hops, as the quickstart's policy saw it done."""
    rows = run_expert(invented, ThinkingWarmStart(), tmp_path_factory.mktemp("practised"))
    return {hops: [row for row in rows if row.question.metadata["hops"] == hops] for hops in (1, 2)}


def mean(rows: list[EvaluatedTrajectory], measure: str) -> float:
    values = [row.measures[measure] for row in rows]
    return sum(value for value in values if value is not None) / len(values)


def test_without_mistakes_it_answers_with_the_real_search_engine(invented: World, tmp_path: Path) -> None:
    rows = run_expert(invented, ThinkingWarmStart(noise=NO_NOISE), tmp_path)
    assert mean(rows, "exact_match") >= 0.95


def test_by_default_it_mostly_searches_once(practised: dict[int, list[EvaluatedTrajectory]]) -> None:
    assert mean(practised[1], "searches") == 1.0
    assert 1.0 < mean(practised[2], "searches") < 1.5
