"""Two processes that resume within a generation cycle, in any epoch, go on as if they had never stopped."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.agents import search_index, steps_after
from tests.distributed.launch import launch


@dataclass(frozen=True)
class ResumeCase:
    """It travels to the worker as JSON."""

    folder: str
    trainer: str
    steps: list[int]
    """Steps whose checkpoints are resumed."""


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("config", "trainer"),
    [
        ("ddp_cpu", "so_grpo"),
        pytest.param(
            "zero2_cpu", "so_ppo", marks=pytest.mark.skipif(find_spec("deepspeed") is None, reason="no DeepSpeed")
        ),
    ],
)
def test_checkpoints_continue_exactly(tmp_path: Path, config: str, trainer: str) -> None:
    search_index(tmp_path)
    # Within a cycle; at the end of an epoch; within a cycle of the second epoch.
    case = ResumeCase(str(tmp_path), trainer, [1, 4, 5])
    result = launch(config, case, worker="tests.distributed.resume_worker")
    assert result["epoch"] > 1
    for step, resumed in result["resumed"].items():
        ours, theirs = (steps_after(int(step), run["logs"]) for run in (resumed, result))
        assert ours == theirs, f"resumed after step {step}"
        assert resumed["distance"] == 0.0, f"resumed after step {step}"
    assert max(log["grad_norm"] for log in result["logs"] if "grad_norm" in log) > 0
