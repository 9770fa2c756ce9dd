"""Which run of the verdict comes next, and what its report says of the runs that are there."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import verdict
from benchmarks.common import Row
from benchmarks.stability_run import Job
from benchmarks.verdict_run import CURVES, ROLLOUTS

START = {"sampled": 0.5, "by_hops": [0.9, 0.1], "greedy": 0.5}


def row(job: Job, sampled: float) -> Row:
    curves = {name: [0.0] * ROLLOUTS for name in CURVES}
    judged = {"sampled": sampled, "by_hops": [sampled, sampled], "greedy": sampled, "start": START, "error": None}
    return {**vars(job), **judged, **curves, "seconds": [360, 0], "rates": [job.rate]}


def searched(scores: dict[float, float]) -> list[Row]:
    """What the choosing seeds scored with GRPO at these learning rates."""
    return [
        row(verdict.job("long", "grpo", s, rate), score) for rate, score in scores.items() for s in verdict.CHOOSING
    ]


def test_yoked_runs_wait_for_what_they_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "RUNS", tmp_path)
    monkeypatch.setattr(verdict, "claim", lambda path, lock: True)
    every = [*dict.fromkeys(job for _, job in verdict.plan([]))]
    default, yoked = every[:2]
    assert (default.arm, yoked.arm) == (verdict.DEFAULT, verdict.YOKED)
    assert verdict.next_job([]) == default
    assert verdict.next_job([row(default, 0.6)]) == yoked
    assert verdict.next_job([row(job, 0.6) for job in every if job not in (default, yoked)]) == default
    assert verdict.followed(yoked) == default


def test_an_arm_is_judged_at_the_best_rate_once_all_have_run() -> None:
    found = searched({1.5e-6: 0.6, 5e-6: 0.7, 1.5e-5: 0.7})
    assert verdict.judged(found, "long", "grpo") == []
    found += searched({5e-5: 0.1})
    assert {job.rate for job in verdict.judged(found, "long", "grpo")} == {5e-6}, "of equals the lowest"
    assert {job.rate for job in verdict.judged(found, "long-hard", "grpo")} == {1.5e-5}, "three times"
    assert verdict.judged(found, "short", "grpo") == [], "each length of turns is searched"


def test_the_report_compares_runs_of_one_seed() -> None:
    scores = {verdict.DEFAULT: (0.7, 0.6, 0.8), verdict.YOKED: (0.6, 0.4)}
    rows = [
        row(verdict.job("short", arm, seed), score)
        for arm, of in scores.items()
        for seed, score in zip(verdict.JUDGING, of, strict=False)
    ]
    rows[-1]["reward"] = [0.0]  # it died after its first rollout
    lines = verdict.report(rows).splitlines()
    yoked = next(line for line in lines if line.startswith("| GRPO, yoked"))
    assert "0.500 ± 0.100 | +0.150 ± 0.050 [-0.485, +0.785] | 1 |" in yoked
    assert "| the pair | 96 | 5 | 0.5 |" in lines
