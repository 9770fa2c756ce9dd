"""Figures of a run, their intervals, and the difference between two runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sorl_trl.evaluation.figures import (
    RESAMPLES,
    Floats,
    Run,
    bootstrap,
    compare_runs,
    figure,
    format_results,
    p_value,
    read_run,
    summarize,
)
from sorl_trl.evaluation.run import RunFolder
from sorl_trl.records import evaluation_of
from sorl_trl.records.evaluated import files_hash
from sorl_trl.types import StopReason

from .trajectories import outcome


def test_a_sampled_question_counts_once_by_its_mean() -> None:
    outcomes = [
        *(outcome("ann", score, i, searches=i) for i, score in enumerate([1.0, 0.0, 0.0, 0.0])),
        *(outcome("bob", score, i, searches=4) for i, score in enumerate([1.0, 1.0])),
        outcome("bob", None, 2),
        outcome("bob", None, 3),
        *(outcome("cy", 0.0, i, searches=0) for i in range(4)),
        *(outcome("di", None, i) for i in range(4)),
    ]
    summary = summarize("nq", outcomes)
    assert (summary["questions"], summary["trajectories"], summary["masked"]) == (4, 16, 6)
    assert summary["means"]["exact_match"]["mean"] == pytest.approx((0.25 + 1 + 0) / 3)
    assert summary["means"]["searches"]["mean"] == pytest.approx((1.5 + 4 + 0) / 3)
    best = summary["best_of_n"]
    assert best["exact_match"]["mean"] == best["correct"]["mean"] == pytest.approx(2 / 3)
    assert "searches" not in best
    assert summary["stop_reasons"]["answered"] == 10 / 16
    assert summary["stop_reasons"]["search_unavailable"] == 6 / 16
    assert set(summary["stop_reasons"]) == {reason.value for reason in StopReason}


def test_the_table_has_whatever_was_measured() -> None:
    """A column for each dataset and one for their mean; a dash where a dataset lacks the measure."""
    task = {**outcome("bob", 1.0), "environment": {"hits": 3.0}}
    table = format_results([summarize("nq", [outcome("ann", 0.0, searches=2.0)]), summarize("own", [task])])
    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for cells in map(split, table.splitlines())}
    assert rows[""] == ["nq", "own", "mean"]
    assert rows["exact_match"] == ["0.000 [0.000, 0.000]", "1.000 [1.000, 1.000]", "0.500"]
    assert rows["hits"] == ["-", "3.000 [3.000, 3.000]", "3.000"]
    assert rows["ended: answered"] == ["1.000", "1.000", ""]


def split(line: str) -> list[str]:
    return line.split("|") if "|" in line else ["", "text"]


def estimate(values: list[float], stream: str = "nq") -> tuple[float, Floats]:
    return bootstrap({"score": np.array(values)}, stream)["score"]


def p_of(values: list[float]) -> float:
    return p_value(estimate(values)[1])


class TestBootstrap:
    def test_two_questions_are_drawn_in_four_equally_likely_ways(self) -> None:
        mean, resampled = estimate([0.0, 1.0])
        assert set(resampled) == {0.0, 0.5, 1.0}
        for each, share in ((0.0, 0.25), (0.5, 0.5), (1.0, 0.25)):
            assert (resampled == each).mean() == pytest.approx(share, abs=0.02)
        assert figure(mean, resampled) == {"mean": 0.5, "low": 0.0, "high": 1.0}

    def test_p_is_one_without_a_difference_and_least_where_no_resample_is_on_the_other_side(self) -> None:
        assert p_of([0.0, 0.0, 0.0]) == 1
        assert p_of([-1.0, 1.0]) == 1
        assert p_of([1.0, 2.0]) == pytest.approx(2 / (RESAMPLES + 1))
        # One in eight draws of three takes the two zeros' side only: 2 * (2/3)^3.
        assert p_of([0.0, 0.0, 1.0]) == pytest.approx(2 * (2 / 3) ** 3, abs=0.03)

    def test_a_column_is_averaged_over_the_questions_that_have_it(self) -> None:
        nan = float("nan")
        columns = {"all": np.array([1.0, 2.0, 6.0]), "some": np.array([nan, 2.0, nan]), "none": np.full(3, nan)}
        estimates = bootstrap(columns, "mixed")
        assert set(estimates) == {"all", "some"}
        assert estimates["all"][0] == 3
        assert figure(*estimates["some"]) == {"mean": 2, "low": 2, "high": 2}
        assert np.isnan(estimates["some"][1]).mean() == pytest.approx((2 / 3) ** 3, abs=0.02)


def run(**datasets: dict[str, float | None]) -> Run:
    return {name: [outcome(asked, score) for asked, score in scores.items()] for name, scores in datasets.items()}


class TestComparison:
    def test_differences_are_taken_question_by_question(self) -> None:
        before = run(nq={"ann": 0.0, "bob": 1.0, "cy": 0.0, "di": 1.0})
        after = run(nq={"di": 1.0, "cy": 1.0, "bob": 1.0, "ann": 1.0})  # in another order
        (nq,) = compare_runs(before, after)
        assert (nq["name"], nq["questions"], nq["left_out"]) == ("nq", 4, 0)
        compared = nq["measures"]["exact_match"]
        assert (compared["before"], compared["after"], compared["mean"]) == (0.5, 1.0, 0.5)
        # Of four questions two got better: no gain is drawn with probability 1/16, and none gets worse.
        assert (compared["low"], compared["high"]) == (0.0, 1.0)
        assert compared["p"] == pytest.approx(2 / 16, abs=0.02)

    def test_what_only_one_run_has_scored_is_left_out_and_counted(self) -> None:
        before = run(nq={"ann": None, "bob": 1.0, "cy": 1.0, "di": 1.0}, popqa={"x": 1.0})
        after = run(nq={"ann": 1.0, "bob": 0.0, "cy": None, **{str(i): 0.0 for i in range(5)}})
        (nq,) = compare_runs(before, after)
        assert (nq["questions"], nq["left_out"], nq["measures"]["exact_match"]["mean"]) == (1, 8, -1)

    @pytest.mark.parametrize("name", ["", "checkpoint-2"])
    def test_a_run_that_was_moved_is_compared_though_another_has_its_name_now(self, tmp_path: Path, name: str) -> None:
        before, moved = tmp_path / "runs/a", tmp_path / "runs/b"
        (before / name).mkdir(parents=True)
        (before / name / "config.json").write_text("1")
        model = {"model_name_or_path": str(before / name), "policy_files": files_hash(before / name)}
        folder = RunFolder(evaluation_of(before))
        folder.claim({"datasets": {}, "model": model})
        folder.finish({}, "")
        before.rename(moved)
        (before / name).mkdir(parents=True)
        (before / name / "config.json").write_text("22")
        assert read_run(str(moved)) == {}
        (moved / name / "config.json").write_text("trained on")
        with pytest.raises(ValueError, match="stale"):
            read_run(str(moved))
