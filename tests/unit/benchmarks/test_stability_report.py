"""The stability benchmark's rows and report, from records made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from benchmarks.stability_report import missing, rows, sections_of, write_report
from benchmarks.stability_statistics import INFINITE, read_runs

from tests.unit.benchmarks.runs import GRID, a_record, choosing, records

REQUIRED = {
    *("regime", "method", "learning_rate", "tuned", "seeds", "collapses", "sampled_em", "greedy_em"),
    *("clip_fraction", "kl_median", "kl_max", "grad_norm_max"),
}


def everything() -> list[dict[str, Any]]:
    """GRPO is best at the lower learning rate and SO-GRPO at the common one; PPO has not run."""
    made = choosing("grpo", {3e-4: (0.5, 0.5), 1e-3: (0.3, 0.3)})
    made += choosing("so_grpo", {3e-4: (0.5, 0.5), 1e-3: (0.6, 0.6)})
    made += records("grpo", (0.4, 0.1, 0.4)) + records("grpo", (0.5, 0.5, 0.5), rate=3e-4)
    return made + records("so_grpo", (0.6, 0.7, 0.8))


def a_row(made: list[dict[str, Any]], method: str = "grpo", tuned: bool = False) -> dict[str, Any]:
    """The one row of a method."""
    (found,) = (row for row in rows(made, GRID) if (row["method"], row["tuned"]) == (method, tuned))
    return found


class TestRows:
    def test_one_row_per_cell_that_has_run(self) -> None:
        made = rows(everything(), GRID)
        assert [(row["method"], row["tuned"], row["learning_rate"]) for row in made] == [
            ("grpo", False, 1e-3),
            ("so_grpo", False, 1e-3),
            ("grpo", True, 3e-4),
            ("so_grpo", True, 1e-3),
        ]
        assert all(row.keys() >= REQUIRED for row in made)
        assert [row["same_runs_as_common"] for row in made] == [False, False, False, True]

    def test_figures_by_hand(self) -> None:
        row = a_row(everything())
        assert (row["seeds"], row["collapses"], row["collapsed_seeds"]) == ([11, 12, 13], 1, [12])
        assert (row["sampled_em"], row["greedy_em"]) == pytest.approx((0.3, 0.4))
        assert row["best_sampled_em"] == pytest.approx((0.4 + 0.3 + 0.4) / 3)
        assert row["sampled_em_by_seed"] == [0.4, 0.1, 0.4]

    def test_training_metrics_by_hand(self) -> None:
        first, second = records("grpo", (0.5, 0.5))
        first["rollouts"] = [
            {"clip_fraction/token": 0.1, "kl_to_old median": 1, "kl_to_old max": 9, "turns/ratio_min": 0.5},
            {"clip_fraction/token": 0.3, "kl_to_old median": 2, "kl_to_old max": 4, "turns/ratio_min": 0.2},
            {"clip_fraction/token": None, "kl_to_old median": 6, "grad_norm max": 7, "turns/ratio_max": 3},
        ]
        second["rollouts"] = [{"clip_fraction/token": 0.4, "kl_to_old median": 4, "kl_to_old max": 5}]
        row = a_row([first, second])
        assert row["clip_fraction"] == pytest.approx(0.3)
        assert (row["kl_median"], row["kl_max"], row["grad_norm_max"]) == (3, 9, 7)
        assert (row["ratio_min"], row["ratio_max"], row["explained_variance"]) == (0.2, 3, None)

    @pytest.mark.parametrize("infinity", ["inf", 1e308])
    def test_infinity_stays_a_number(self, infinity: object) -> None:
        made = records("grpo", (0.5, 0.5))
        for record in made:
            record["rollouts"] = [{"kl_to_old max": infinity, "kl_to_old median": infinity}] * 2
        row = a_row(made)
        assert row["kl_max"] == row["kl_median"] == INFINITE

    def test_differences_are_within_the_family_and_paired(self) -> None:
        made = everything() + records("ppo", (0.9, 0.9, 0.9))
        row = a_row(made, "so_grpo")
        assert row["difference"]["mean"] == pytest.approx(0.4)
        assert row["difference"]["p"] == 2 / 8
        assert row["difference_to_tuned_baseline"]["mean"] == pytest.approx(0.2)
        assert a_row(made, "so_grpo", tuned=True)["difference"]["mean"] == pytest.approx(0.2)
        assert a_row(made, "grpo")["difference"] is None
        assert a_row(made, "grpo")["difference_to_tuned_baseline"]["mean"] == pytest.approx(-0.2)
        assert a_row(made, "ppo")["difference_to_tuned_baseline"] is None

    def test_a_run_that_died(self) -> None:
        made = [*records("grpo", (0.4,)), {**a_record(seed=12), "error": "NaN"}]
        row = a_row(made)
        assert (row["sampled_em"], row["collapses"], row["errors"]) == (0.2, 1, {"12": "NaN"})

    def test_no_runs(self) -> None:
        assert rows([], GRID) == []


class TestMissing:
    def test_nothing_has_run(self) -> None:
        lines = missing([], GRID)
        assert lines[0] == (
            "- Calm, at the common learning rate: GRPO (3 of 3 runs), SO-GRPO (3 of 3 runs), PPO (3 of 3 runs)."
        )
        assert lines[1].startswith("- Calm, choosing learning rates: GRPO (2 of 2 runs)")
        assert len(lines) == 4

    def test_a_chosen_learning_rate_is_to_be_judged(self) -> None:
        made = [record for record in everything() if (record["learning_rate"], record["seed"]) != (3e-4, 12)]
        lines = [line for line in missing(read_runs(made, GRID), GRID) if "Calm" in line]
        assert lines == [
            "- Calm, at the common learning rate: PPO (3 of 3 runs).",
            "- Calm, choosing learning rates: PPO (2 of 2 runs).",
            "- Calm, at each method's own learning rate: GRPO (1 of 3 runs).",
        ]


class TestWriteReport:
    def test_files(self, tmp_path: Path) -> None:
        write_report(everything(), tmp_path / "results", GRID)
        names = {path.name for path in (tmp_path / "results").iterdir()}
        assert names == {"stability.json", "stability.md", "stability.png", "stability_calm.png"}
        assert json.loads((tmp_path / "results/stability.json").read_text()) == rows(everything(), GRID)

    def test_a_method_that_is_not_drawn(self, tmp_path: Path) -> None:
        methods = dict(GRID.methods) | {"so_grpo": SimpleNamespace(**vars(GRID.methods["so_grpo"]) | {"drawn": False})}
        with_it, without = tmp_path / "with", tmp_path / "without"
        write_report(everything(), with_it, GRID)
        write_report(everything(), without, replace(GRID, methods=methods))
        assert (with_it / "stability.md").read_text() == (without / "stability.md").read_text()
        assert (with_it / "stability.png").read_bytes() != (without / "stability.png").read_bytes()

    def test_tables(self, tmp_path: Path) -> None:
        write_report(everything(), tmp_path, GRID)
        text = (tmp_path / "stability.md").read_text()
        assert "| SO-GRPO | 0.700 [0.600, 0.800]³ · 0/3 |" in text
        assert (
            "| GRPO | 0.300 [0.100, 0.400]³ | 0.400 | 0.367 | 1/3 | 0.1 | – / 0.5 | – | – / – | – | -0.200 [" in text
        )
        assert "| SO-GRPO | 0.001 = common | 0.700 [0.600, 0.800]³ |" in text
        assert "+0.200 [+0.100, +0.300], p 0.25 |" in text
        assert "| GRPO | **0.500 · 0/2**† | 0.300 · 0/2 |" in text
        assert "- **Wild**: many updates. `epochs=8`, `world='high'`" in text
        assert "- **SO-GRPO**: turn ratios. `family='grpo'`, `ctn_coef=3.0`" in text
        assert "14 runs" not in text and "17 runs of one thread each, 170 CPU" in text
        assert "## Wild" not in text

    def test_who_died_is_named(self, tmp_path: Path) -> None:
        died = {**a_record(seed=12), "evaluations": [], "rollouts": [], "error": "weights are NaN\nmore"}
        write_report([*records("grpo", (0.4,)), died], tmp_path, GRID)
        text = (tmp_path / "stability.md").read_text()
        assert "1/2 (1 died)" in text
        assert "collapsed with an EM of 0: GRPO, seed 12: weights are NaN.\n" in text

    def test_the_reading_stands_with_its_regime(self, tmp_path: Path) -> None:
        write_report(everything(), tmp_path, GRID, "In short.\n\n## calm\n\nIt held.\n")
        text = (tmp_path / "stability.md").read_text()
        assert (
            "\n\nIn short.\n\n## Calm\n\nfew updates\n\nIt held.\n\n### At the common learning rate, 0.001\n" in text
        )

    def test_a_regime_without_learning_rates_to_choose_from(self, tmp_path: Path) -> None:
        write_report(everything(), tmp_path, replace(GRID, choices={"calm": (), "wild": ()}))
        # Such runs are there, asked for or not.
        assert "### Choosing" in (tmp_path / "stability.md").read_text()
        write_report(records("grpo", (0.5,)), tmp_path, replace(GRID, choices={"calm": (), "wild": ()}))
        assert "### Choosing" not in (tmp_path / "stability.md").read_text()

    def test_no_runs(self, tmp_path: Path) -> None:
        write_report([], tmp_path, GRID)
        assert {path.name for path in tmp_path.iterdir()} == {"stability.json", "stability.md"}
        assert "## Not run yet" in (tmp_path / "stability.md").read_text()

    def test_only_choosing_runs(self, tmp_path: Path) -> None:
        write_report(choosing("grpo", {3e-4: (0.5, 0.5)}), tmp_path, GRID)
        assert "| method | 0.0003 |\n| --- | ---: |\n| GRPO | 0.500 · 0/2 |" in (tmp_path / "stability.md").read_text()


def test_a_reading_of_no_regime_is_refused() -> None:
    with pytest.raises(ValueError, match=r"heading 'windy'; allowed are \['calm', 'wild'\]"):
        sections_of("## windy\nIt blew.", GRID)
