from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from benchmarks import method_switches as switches
from benchmarks.method_measured import Measured
from benchmarks.method_pages import by_regime
from benchmarks.method_settings import Method
from benchmarks.stability_statistics import Run

from tests.unit.benchmarks.runs import GRID, a_record

PLAN = replace(
    GRID,
    methods={"so_grpo": Method("ours", "so_grpo", "", {}), "so_llds": Method("ours + LLDS", "so_grpo", "", {})},
)


@pytest.fixture(autouse=True)
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "KINDS", {"both": ("calm", "wild"), "calm alone": ("calm",), "hunts": ("hunt",)})


def measured(**ems: Any) -> Measured:
    """The final EM of seeds 11 and 12 in the calm regime, and of 11 in the wild one, which has a world of its own."""
    places = (("calm", 11, 1e-3), ("calm", 12, 1e-3), ("wild", 11, 5e-4))
    runs = [
        Run(a_record(name, seed, em, regime, rate))
        for name, of in ems.items()
        for (regime, seed, rate), em in zip(places, of, strict=False)
    ]
    return Measured(PLAN, by_regime(runs, PLAN), {}, {})


def test_each_kind_has_the_mean_over_its_worlds() -> None:
    found = measured(so_grpo=(0.5, 0.5, 0.5), so_llds=(0.6, 0.8, 0.5))
    # .1, .3 and 0 over three worlds: mean .133, deviation .1528; of 8 flips 4 are as far from 0.
    both, calm = "+0.133 ± 0.088 (3, p 0.5)", "+0.200 ± 0.100 (2, p 0.5)"
    for score in ("sampled_em", "greedy_em"):
        assert switches.switch_rows(found, score) == [["ours + LLDS", both, calm, "–"]]


def test_the_section_counts_its_comparisons() -> None:
    text = switches.switches_section(measured(so_grpo=(0.5, 0.5, 0.5), so_llds=(0.6, 0.8, 0.5)))
    assert "Here are 4 comparisons" in text and text.count("| ours + LLDS |") == 2


def test_where_no_switch_was_run_there_is_no_section() -> None:
    assert switches.switches_section(measured(so_grpo=(0.5,))) == ""
