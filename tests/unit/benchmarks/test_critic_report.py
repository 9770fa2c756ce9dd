"""The page about critics: what has been measured is in it, and what has not been leaves no row."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from benchmarks import critic_report

NAN = math.nan
CEILING: dict[str, Any] = {
    "sampled_em": 0.89,
    "overall": 0.43,
    "interval": [0.34, 0.5],
    "by_turn": [0.03, 0.6, 0.8, NAN],
    "intervals": [[0.0, 0.05], [0.43, 0.71], [0.7, 0.86], [NAN, NAN]],
    "states": [2048, 2040, 1021, 7],
}
EPOCHS: list[dict[str, Any]] = [
    {"epoch": 1, "overall": 0.07, "by_turn": [0.01, 0.1]},
    {"epoch": 2, "overall": 0.2, "by_turn": [0.05, 0.31]},
    {"epoch": 3, "overall": 0.1, "by_turn": [0.02, 0.2]},
]
PLACES: list[dict[str, Any]] = [
    {"policy": "warm", "seed": 101, "ceiling": CEILING, "regression": {1024: EPOCHS}, "critic": None, "missing": []},
    {"policy": "so_grpo", "seed": 101, "ceiling": None, "regression": {}, "critic": None, "missing": ["ceiling"]},
    {
        "policy": "so_ppo",
        "seed": 102,
        "ceiling": CEILING,
        "regression": {},
        "critic": {"during": [9.0, 0.1, 0.2, 0.3, None, 0.4], "overall": 0.05, "by_turn": [-0.01, 0.04, 0.15, NAN]},
        "missing": ["regression-1024", "regression-4096"],
    },
]


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(critic_report, "RESULTS", tmp_path)
    critic_report.write_report(PLACES)
    assert json.loads((tmp_path / "critic_ceiling.json").read_text())[0]["ceiling"]["by_turn"][3] is None
    return (tmp_path / "critic_ceiling.md").read_text()


def test_ceilings_have_intervals(page: str) -> None:
    row = "0.89 | 0.43 (0.34 to 0.50) | 0.03 (0.00 to 0.05) | 0.60 (0.43 to 0.71) | 0.80 (0.70 to 0.86) |"
    assert f"| warm | 101 | {row}" in page and f"| so_ppo | 102 | {row}" in page


def test_the_best_epoch_of_a_regression(page: str) -> None:
    assert "| warm | 101 | 1024 | 2 | 0.07 0.20 0.10 | 0.20 | 0.05 | 0.31 |  |" in page
    assert "| so_ppo | 102 | 1024" not in page


def test_a_critic_stands_beside_its_ceiling(page: str) -> None:
    assert "| so_ppo | 102 | 0.25 | 0.05 | -0.01 | 0.04 | 0.15 | 0.43 |" in page


def test_what_is_missing_is_said(page: str) -> None:
    lines = page.splitlines()
    start = lines.index("## Not measured yet") + 2
    assert lines[start : start + 3] == [
        "- so_grpo, seed 101: ceiling",
        "- so_ppo, seed 102: regression-1024, regression-4096",
        "",
    ]
    assert "| so_grpo | 101" not in page
