"""Real runs with a learning rate that is too high, held back by `target_kl`; a warning where it is off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sorl_trl.rollout import RolloutLimits
from sorl_trl.trainers.optimizer_step import FIRST_FACTOR
from tests.agents import build_agent

TARGET = 0.02
HOT = 0.3
UPDATES = 8
"""Optimizer steps of a rollout."""
STEPS = 4 * UPDATES


def hot(folder: Path, **overrides: Any) -> Any:
    """A run whose KL only the target holds back."""
    fields: dict[str, Any] = {
        "per_device_train_batch_size": 8,
        "steps_per_generation": 1,
        "gradient_accumulation_steps": 1,
        "num_iterations": UPDATES,
        "max_steps": STEPS,
        "learning_rate": HOT,
        "lr_scheduler_type": "constant",
        "target_kl": TARGET,
        "scale_clip_range": False,  # with the range of turns the policy hardly moves
        "method": {"terms": {"clip_penalty": {"coef": 3.0, "epsilon": None}}},
    }
    folder.mkdir(exist_ok=True)
    trainer = build_agent(folder, **{**fields, **overrides})
    trainer.train()
    return trainer


def logged(trainer: Any, metric: str) -> dict[int, float]:
    return {log["step"]: log[metric] for log in trainer.state.log_history if metric in log}


def test_the_factor_falls_and_holds_the_kl(tmp_path: Path) -> None:
    """It is that of the update whose KL is seen, also in the learning rate that transformers logs for that update."""
    held, free = hot(tmp_path / "held"), hot(tmp_path / "free", target_kl=0.0)
    assert logged(free, "lr_factor") == {}
    factors, kls, rates = (logged(held, name) for name in ("lr_factor", "kl_to_old", "learning_rate"))
    assert factors[1] == FIRST_FACTOR
    after_the_first_rollout = range(UPDATES + 1, STEPS + 1)
    assert max(factors[step] for step in after_the_first_rollout) < 0.2
    ours, theirs = (
        sum(kl for step, kl in logged(trainer, "kl_to_old").items() if step in after_the_first_rollout)
        for trainer in (held, free)
    )
    assert 2 * ours < theirs  # seeds that were tried: from a third to a ninetieth
    for step in range(2, STEPS + 1):
        change = factors[step] / factors[step - 1]
        if kls[step] > 2 * TARGET:  # per token; turns have several, so what is compared with the target is more
            assert change == pytest.approx(1 / 1.5) or factors[step] == 0.01, step
        assert rates[step] == pytest.approx(HOT * factors[step]), step
        assert change == 1.0 or step % UPDATES != 1, "the first update on a rollout has no effect"


def test_a_second_run_begins_with_a_rollout_of_its_own(tmp_path: Path) -> None:
    """Or what the policy had moved since the first run's last rollout would count as noise: steps begin at 0 again."""
    trainer = hot(tmp_path, max_steps=UPDATES - 2)
    trainer.train()
    kls = logged(trainer, "kl_to_old")
    assert kls[1] < 1e-6 < kls[2]


NO_TARGET, NO_SCALE = {"target_kl": 0.0}, {"scale_clip_range": False}


@pytest.mark.parametrize(
    ("fields", "longest", "named"),
    [
        ({}, 60, []),
        (NO_TARGET, 60, ["target_kl"]),
        (NO_TARGET, 50, []),
        (NO_TARGET | {"importance_sampling_level": "token"}, 60, ["target_kl"]),
        (NO_TARGET | {"num_iterations": 1, "steps_per_generation": 2}, 60, []),
        (NO_SCALE, 60, ["scale_clip_range"]),
        (NO_SCALE | NO_TARGET, 60, ["target_kl", "scale_clip_range"]),
        (NO_SCALE | {"importance_sampling_level": "token"}, 60, []),
        ({"method": "grpo"}, 60, []),
        ({"method": {"name": "so_grpo", "target_kl": 0.0}, "epsilon": 0.28}, 60, ["target_kl"]),
    ],
)
def test_long_turns_without_a_trust_region_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fields: dict[str, Any], longest: int, named: list[str]
) -> None:
    limits = RolloutLimits(max_turn_tokens=longest, max_observation_tokens=6)
    build_agent(tmp_path, limits=limits, **{"max_completion_length": 200, **fields})
    warnings = [each for each in caplog.messages if "turns may have" in each]
    assert len(warnings) == bool(named)
    for name in NO_TARGET | NO_SCALE:
        assert any(f"`{name}`" in each and "60 tokens" in each for each in warnings) == (name in named)
