"""The page of a report: what it says of runs, and that their texts stay texts."""

from __future__ import annotations

import base64
import re
from math import inf, nan
from pathlib import Path

import pytest

from sorl_trl.diagnostics.report import render_page, summary_of, write_report
from sorl_trl.diagnostics.runs import Run
from tests.unit.viewer.entries import Parsed


def test_the_summary_of_a_run_that_collapses_and_of_one_that_says_little() -> None:
    collapses = [0.6] * 10 + [0.05] * 12
    history = [{"step": step, "reward": reward} for step, reward in enumerate(collapses, 1)]
    full, empty = summary_of(Run("a", history, 40)), summary_of(Run("b", [{"step": 3, "grad_norm": 1.0}]))
    assert full.pop("alarms").startswith("reward_fall: ")
    assert full == {"run": "a", "optimizer steps": "22 of 40", "reward at the end": "0.050\nbest 0.600, step 5"}
    assert empty == {"run": "b", "optimizer steps": "3", "reward at the end": "–", "alarms": "–"}


@pytest.mark.parametrize(("norms", "alarms"), [([inf, inf, 1.0, nan, 2.0], 0), ([1.0, nan, nan], 1)])
def test_steps_that_a_gradient_scaler_left_out_are_no_alarm(norms: list[float], alarms: int) -> None:
    """Weights that are no numbers give no gradient that is one."""
    history = [{"step": step, "grad_norm": norm} for step, norm in enumerate(norms, 1)]
    assert summary_of(Run("a", history))["alarms"].count("not_finite") == alarms


@pytest.mark.parametrize("text", ["<script>alert(1)</script>", "' onload='alert(1)", '"><b>', "&lt;", "</style>"])
def test_text_stays_text(text: str) -> None:
    def tags(name: str) -> list[tuple[str, list[str]]]:
        runs = [Run(name, []), Run("other", [])]
        return [(tag, [*attributes]) for tag, attributes in Parsed(render_page(runs, b"png")).tags]

    assert tags(text) == tags("plain")


def test_one_page_that_needs_no_other_file(tmp_path: Path) -> None:
    runs = [Run("one", [{"step": 1, "reward": 0.5}]), Run("two", [{"step": 1, "reward": 0.25}])]
    path = write_report(runs, tmp_path / "new" / "folder")
    assert [*path.parent.iterdir()] == [tmp_path / "new" / "folder" / "report.html"]
    page = Parsed(path.read_text(encoding="utf-8"))
    assert [text for _, text in page.all("td")][::4] == ["one", "two"]
    [(image, _)] = page.all("img")
    assert base64.b64decode((image["src"] or "").removeprefix("data:image/png;base64,")).startswith(b"\x89PNG")
    assert not re.search(r"https?:|@import|url\(", path.read_text(encoding="utf-8"))


def test_nothing_to_draw_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has a metric of"):
        write_report([Run("one", [{"step": 1}])], tmp_path / "report")
    assert not (tmp_path / "report").exists()
