"""The stability benchmark: its late rollouts have the log-probabilities of their own policy; how it chooses a rate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.stability_plan import CHOOSING_SEEDS
from benchmarks.stability_report import rate_of
from benchmarks.stability_run import LateRollouts

from tests.agents import build_agent, logged

ONE_UPDATE = {"num_iterations": 1, "steps_per_generation": 1, "gradient_accumulation_steps": 1}


def build(folder: Path, staleness: int, **overrides: Any) -> Any:
    fields = {"per_device_train_batch_size": 4, "num_generations": 2, "max_steps": 6, "logging_steps": 1}
    trainer = build_agent(folder, **{**fields, "learning_rate": 1e-2, **overrides})
    LateRollouts(trainer, staleness)
    return trainer


def test_trajectories_are_as_old_as_asked(tmp_path: Path) -> None:
    trainer = build(tmp_path, 2, max_steps=16, **{**ONE_UPDATE, "num_iterations": 2})
    trainer.train()
    # Rollouts 0a 0b | 1a 1b | 2 | 3 | 4 … are collected at steps 0, 2, 4, …, and trained on in that order.
    assert logged(trainer, "off_policy_age") == [0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 4, 5, 4, 5, 4, 5]


def test_old_logps_are_of_the_sampling_policy_even_with_one_update_per_rollout(tmp_path: Path) -> None:
    """TRL would take the log-probabilities of the policy that is being updated: every ratio 1, nothing corrected."""
    trainer = build(tmp_path, 1, **ONE_UPDATE)
    trainer.train()
    kl = logged(trainer, "kl_to_old")
    assert kl[0] == pytest.approx(0.0, abs=1e-7)
    assert min(kl[1:]) > 1e-4


def test_no_rate_is_chosen_before_all_first_rates_have_run() -> None:
    """Or a study that was interrupted would judge with a rate that a later one beats."""

    def rows(scores: dict[float, float]) -> list[dict[str, Any]]:
        made = {"column": "reuse", "arm": "grpo"}
        return [
            {**made, "rate": rate, "seed": seed, "score": score}
            for rate, score in scores.items()
            for seed in CHOOSING_SEEDS
        ]

    found = rows({3e-5: 0.4, 1e-4: 0.5, 3e-4: 0.45})
    assert rate_of(found, "reuse", "grpo") is None
    assert rate_of(found + rows({1e-3: 0.3}), "reuse", "grpo") == 1e-4
    assert rate_of(found + rows({1e-3: 0.6}), "reuse", "grpo") is None, "the next rate has to run"
