"""Late rollouts of the stability benchmark: each is trained on with the log-probabilities of its own policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
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
