from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks import method_figures, method_pages
from benchmarks.method_claims import MethodPage
from benchmarks.method_measured import Measured, difference_cell
from benchmarks.method_overview import (
    contrasts,
    extra_cost,
    overview_lines,
    overview_page,
    seconds_ratio,
    time_ratio,
)
from benchmarks.method_rates import own_cell, own_table
from benchmarks.method_settings import Method
from benchmarks.stability import save
from benchmarks.stability_run import Job, settings_of
from benchmarks.stability_statistics import Run
from benchmarks.turn_length_grid import LENGTH_REGIMES

from tests.unit.benchmarks.runs import GRID, a_record

SEEDS = (11, 12, 13, 14, 15)
PLAN = replace(
    GRID,
    judging_seeds=SEEDS,
    methods={
        "grpo": Method("GRPO", "trl", "", {}),
        "so_grpo": Method("ours", "so_grpo", "", {}),
        "other": Method("theirs", "so_grpo", "", {"group_refill": 2}),
        "ppo": Method("PPO", "so_ppo", "", {}),
        "never": Method("never", "so_grpo", "", {}),
    },
)
PAGE = MethodPage("Theirs", ("other", "never", "unknown"), "Much better.", "much better")


def measured(replaced: Any = (), **ems: Any) -> Measured:
    """The final EM of each method's seeds, in the calm regime."""
    runs = [Run(a_record(name, seed, em)) for name, of in ems.items() for seed, em in zip(SEEDS, of, strict=False)]
    tables = [method_pages.by_regime(some, PLAN) for some in (runs, replaced)]
    return Measured(PLAN, *tables, costs={})


def test_a_line_by_hand() -> None:
    found = measured(other=(0.6, 0.8), grpo=(0.5, 0.5, 0.9), so_grpo=(0.7,))
    line = method_pages.measured_row("other", "calm", found, ["grpo", "so_grpo", "ppo"])
    # Less GRPO: .1 and .3; both signs alike in 2 of 4 flips. An interval of two values goes from one to the other.
    differences = ["+0.200 [+0.100, +0.300], p 0.5 (2)", "-0.100, p 1 (1)", "–"]
    assert line == ["Calm", "theirs", "0.700³", "0.800", "0/2", *differences]


def test_a_run_that_was_made_again_pairs_with_rows_of_its_harness_and_counts_nowhere_else() -> None:
    old = Run({**a_record("grpo", 11, 0.2), "harness": 1})
    theirs = Run({**a_record("other", 11, 0.6), "harness": 1})
    found = measured([old], grpo=(0.5,))
    assert found.difference("grpo", "grpo", "calm") is None
    tables = {"calm": {**found.tables["calm"], "other": [theirs]}}
    paired = Measured(PLAN, tables, found.replaced, {}).difference("other", "grpo", "calm")
    assert paired is not None and paired["mean"] == pytest.approx(0.4)
    assert Measured(PLAN, tables, {}, {}).difference("other", "grpo", "calm") is None
    (line,) = overview_lines("grpo", MethodPage("GRPO", ("grpo",), "", ""), found, True)
    assert line[1] == "–" and line[3:5] == ["–", "–"]


def test_what_was_not_measured_is_said_and_what_the_benchmark_does_not_have_is_not() -> None:
    assert method_pages.measured_table(PAGE, measured()) == method_pages.NOT_MEASURED
    table = method_pages.measured_table(PAGE, measured(other=(0.5,)))
    assert table.endswith("\nNot measured: `never`.\n")
    assert method_pages.measured_table(MethodPage("T", (), "", ""), measured()) == ""
    lines = overview_lines("theirs", PAGE, measured(other=(0.5,)), is_written=False)
    assert [line[:2] for line in lines] == [["theirs", "–"], ["never", "not measured"]]
    (line,) = overview_lines("x", MethodPage("X", ("unknown",), "", ""), measured(), is_written=True)
    assert line == ["[X](../../docs/methods/x.md)", "not measured", *["–"] * 6, ""]


def test_only_an_interval_that_excludes_0_over_enough_pairs_is_above_or_below() -> None:
    better, worse, mixed = (0.6, 0.7, 0.6, 0.7, 0.6), (0.4, 0.3, 0.4, 0.3, 0.4), (0.6, 0.4, 0.7, 0.3, 0.5)
    base = (0.5,) * 5
    assert contrasts("other", "grpo", measured(other=better, grpo=base)) == ["Calm +0.14", "none"]
    assert contrasts("other", "grpo", measured(other=worse, grpo=base)) == ["none", "Calm -0.14"]
    assert contrasts("other", "grpo", measured(other=mixed, grpo=base)) == ["none", "none"]
    assert contrasts("other", "grpo", measured(other=better[:4], grpo=base)) == ["–", "–"]


def test_seconds_are_a_median_over_pairs() -> None:
    found = measured(other=(0.5,) * 4, grpo=(0.5,) * 3)
    for run, seconds in zip(found.tables["calm"]["other"], (20.0, 30.0, 900.0, 7.0), strict=True):
        run.record["seconds"] = seconds  # type: ignore[index]
    assert seconds_ratio("other", found) == "≈ 3.0 (3)"  # GRPO's runs take 10 seconds, and the fourth seed has none
    assert seconds_ratio("grpo", found) == "–"


def test_what_was_measured_for_it_comes_before_seconds_of_runs() -> None:
    found = replace(measured(other=(0.5,), grpo=(0.5,)), costs={"calm": {"other": 1.5}, "wild": {"other": 2.0}})
    assert time_ratio("other", found) == "1.50 · 2.00"
    assert time_ratio("so_grpo", found) == "–"
    assert time_ratio("other", replace(found, costs={})) == "≈ 1.0 (1)"


def test_our_grpo_stands_in_where_trls_has_no_run_and_the_cell_says_so() -> None:
    plan = replace(PLAN, methods={**PLAN.methods, "plain": Method("control", "so_grpo", "", {})})
    runs = [Run(a_record(name, 11, em)) for name, em in (("other", 0.6), ("plain", 0.5))]
    found = Measured(plan, method_pages.by_regime(runs, plan), {}, {})
    assert difference_cell(found.difference("other", "grpo", "calm")) == "+0.100, p 1 (1)°"
    assert found.difference("plain", "grpo", "calm") is None
    assert found.difference("other", "so_grpo", "calm") is None
    with_trls = [*runs, Run(a_record("grpo", 11, 0.2))]
    found = Measured(plan, method_pages.by_regime(with_trls, plan), {}, {})
    assert difference_cell(found.difference("other", "grpo", "calm")) == "+0.400, p 1 (1)"
    assert difference_cell(found.difference("plain", "grpo", "calm")) == "+0.300, p 1 (1)"


def test_what_a_row_costs_besides() -> None:
    costs = {name: extra_cost(method) for name, method in PLAN.methods.items()}
    assert costs == {**dict.fromkeys(costs, "–"), "ppo": "a critic", "other": "at most 2 batches more to generate"}
    assert extra_cost(Method("", "so_ppo", "", {"information_gain_coef": 1.0}, passes="one")) == (
        "a critic, one update per rollout, a pass over every state"
    )


class TestRenewed:
    TEXT = f"# A\n\n{method_pages.BEGIN}\nold\n{method_pages.END}\n"

    def test_what_stands_around_it_stays(self) -> None:
        once = method_pages.renewed(self.TEXT, "new")
        assert once == f"# A\n\n{method_pages.BEGIN}\n\nnew\n\n{method_pages.END}\n"
        assert method_pages.renewed(once, "new") == once

    @pytest.mark.parametrize("text", ["# A", TEXT + TEXT, f"{method_pages.END}\n{method_pages.BEGIN}"])
    def test_a_page_without_a_place_for_it_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match="must have '<!-- measured"):
            method_pages.renewed(text, "new")


class TestPicture:
    @pytest.fixture(autouse=True)
    def calm_is_drawn(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (method_figures, method_pages):
            monkeypatch.setattr(module, "SHOWN", ("calm",))

    def test_of_the_rows_that_ran(self, tmp_path: Path) -> None:
        found = measured(other=(0.6, 0.8), grpo=(0.5, 0.5), ppo=(0.4,))
        path = tmp_path / "theirs.png"
        assert method_figures.draw_page(PAGE.rows, found.tables, PLAN, path)
        assert path.read_bytes().startswith(b"\x89PNG")
        assert "theirs.png" in method_pages.measured_part("theirs", PAGE, found)

    def test_of_nothing_there_is_none_left(self, tmp_path: Path) -> None:
        path = tmp_path / "theirs.png"
        path.touch()
        assert not method_figures.draw_page(PAGE.rows, measured(grpo=(0.5,)).tables, PLAN, path)
        assert not path.exists()
        assert ".png" not in method_pages.measured_part("theirs", PAGE, measured(grpo=(0.5,)))

    def test_the_method_beside_the_baseline_and_our_defaults(self) -> None:
        assert [*method_figures.lines_of_family(("other", "ppo"), "grpo", PLAN)] == ["grpo", "so_grpo", "other"]
        assert method_figures.baselines_of(("other",), PLAN) == ("grpo", "so_grpo")
        assert method_figures.baselines_of(("ppo", "unknown"), PLAN) == ("grpo", "so_grpo", "ppo", "so_ppo")


def test_a_page_that_is_not_written_has_no_link() -> None:
    text = overview_page(measured(), ["loop"])
    assert "docs/methods/loop.md" in text and "docs/methods/gspo.md" not in text


def test_a_row_at_its_own_rate_beside_ours_at_the_common_one_and_the_control_at_its_own() -> None:
    plan = replace(PLAN, methods={**PLAN.methods, "plain": Method("control", "so_grpo", "", {})})
    own = [
        Run({**a_record(name, 11, em), "learning_rate": rate})
        for name, em, rate in (("other", 0.6, 3e-4), ("plain", 0.5, 1e-3))
    ]
    tables = {"calm": {"so_grpo": [Run(a_record("so_grpo", 11, 0.8))]}}
    found = Measured(plan, tables, {}, {}, own={"calm": {run.cell[1]: [run] for run in own}})
    *_, line = own_table(PAGE, found).split("\n\n")[0].splitlines()
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:4] == ["Calm", "theirs", "0.0003 (at the end)", "0.600³"]
    assert cells[-2:] == ["-0.200, p 1 (1)", "+0.100, p 1 (1)"]
    assert own_cell("other", found) == "Calm (-0.20)"
    assert own_cell("so_grpo", found) == "–"
    assert own_table(PAGE, replace(found, own={})) == ""


def test_long_turns_are_among_the_regimes_and_nobody_chooses_a_rate_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    regime, seed = "turns-of-40-in-3-hops", 201
    job = Job(regime, "so_grpo", LENGTH_REGIMES[regime].learning_rate, seed)
    fields = {"learning_rate": job.learning_rate, "settings": settings_of(job)}
    record = {**a_record("so_grpo", seed, 0.4, regime), **fields}
    foreign = [{**record, "seed": 202, "settings": "others"}, {**record, "regime": "turns-of-4-in-3-hops"}]
    save([record, *foreign], tmp_path / "runs.xz")
    monkeypatch.setattr(method_pages.turn_length, "ARCHIVE", tmp_path / "runs.xz")
    monkeypatch.setattr(method_pages, "ARCHIVE", tmp_path / "none.xz")
    monkeypatch.setattr(method_pages, "REPLACED", tmp_path / "none.xz")
    found = method_pages.read_all()
    assert [run.final("sampled_em") for run in found.tables[regime]["so_grpo"]] == [0.4]
    assert found.tables.keys() == {regime}
    assert found.grid.learning_rates(regime) == []
