"""The expert that thinks before it acts."""

from __future__ import annotations

from pathlib import Path

from sorl_trl.sandbox import NO_NOISE, ThinkingWarmStart, World

from .helpers import mean, run_expert


def test_without_mistakes_it_answers_with_the_real_search_engine(invented: World, tmp_path: Path) -> None:
    rows = run_expert(invented, ThinkingWarmStart(noise=NO_NOISE), tmp_path)
    assert mean(rows, "exact_match") >= 0.95


def test_by_default_it_mostly_searches_once(invented: World, tmp_path: Path) -> None:
    """As the quickstart's policy saw it done."""
    rows = run_expert(invented, ThinkingWarmStart(), tmp_path)
    assert mean(rows, "searches", 1) == 1.0
    assert 1.0 < mean(rows, "searches", 2) < 1.5
