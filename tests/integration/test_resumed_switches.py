"""A run with switches continues exactly where it is resumed within a rollout: a few here, and slowly every pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.agents import steps_after
from tests.covering import Row
from tests.switch_pairs import ARRAY
from tests.switch_runs import World, config_of
from tests.switches import FACTORS

STEPS = 6
CYCLE = {"per_device_train_batch_size": 8, "steps_per_generation": 2, "num_iterations": 2, "max_steps": STEPS}
"""Four optimizer steps on each rollout, of four groups."""
CASES: dict[str, dict[str, str]] = {
    "filter": {"filter": "zero_variance"},
    "void": {"void": "on"},
    "both": {"filter": "zero_variance", "void": "on", "target_kl": "on"},
    "loss": {"void": "on", "llds": "on", "double_sided": "on", "loss": "turn", "level": "turn"},
    "minirl": {"filter": "top_k", "filter_reward": "named", "loss": "minirl", "normalization": "kl_by_token"},
    "credit": {"filter": "top_p", "rewards": "both", "turn_rewards": "separate", "gain": "on", "step": "on"},
    "refill": {"filter": "zero_variance", "refill": "on", "void": "on", "baseline": "leave_one_out"},
    "bias": {"filter": "zero_variance", "normalization": "bias_norm", "scale": "batch", "loss": "dapo"},
    "critic": {"trainer": "head", "filter": "zero_variance", "void": "on", "gain": "on"},
    "adapter": {"trainer": "adapter", "filter": "top_k", "loss": "luspo", "advantages": "of_tokens"},
}


def run(world: World, row: Row, folder: Path, **options: Any) -> Any:
    length = 512 if world.engine == "tools" else 32
    fields = {"max_completion_length": length, "learning_rate": 1e-2, "save_strategy": "steps", "save_steps": 3}
    trainer = world.build(row, config_of(row, folder, **CYCLE, **fields))
    trainer.train(**options)
    return trainer


def logs_of_exact_continuation(world: World, row: Row, folder: Path) -> list[dict[str, Any]]:
    """What the whole run logs, once one that is resumed from its middle has logged the same and ended the same."""
    whole = run(world, row, folder / "whole")
    resumed = run(world, row, folder / "resumed", resume_from_checkpoint=str(folder / "whole/checkpoint-3"))
    theirs = steps_after(3, whole.state.log_history)
    # As text, in which one NaN is like another.
    assert repr(steps_after(3, resumed.state.log_history)) == repr(theirs)
    assert len(theirs) == STEPS - 3
    for parameter, weight in resumed.model.state_dict().items():
        assert torch.equal(weight, whole.model.state_dict()[parameter]), parameter
    return whole.state.log_history


@pytest.mark.parametrize("name", CASES)
def test_it_continues_exactly(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    row = {factor: next(iter(values)) for factor, values in FACTORS.items()} | {"engine": "search", **case}
    logs = logs_of_exact_continuation(World(tmp_path, "search"), row, tmp_path)
    if "filter" in case:
        assert min(log.get("groups/kept", 1.0) for log in logs) < 1.0, "no group was dropped: a weak test"
    if "void" in case:
        assert any(0.0 < log.get("trajectories_void", 0.0) < 1.0 for log in logs), "none or all were void: a weak test"


@pytest.mark.slow
@pytest.mark.parametrize("row", ARRAY, ids=[f"{i}" for i in range(len(ARRAY))])
def test_a_row_continues_exactly(tmp_path: Path, row: Row) -> None:
    logs_of_exact_continuation(World(tmp_path, row["engine"]), row, tmp_path)
