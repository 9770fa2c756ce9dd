"""Two processes that resume within a generation cycle, in any epoch, go on as if they had never stopped."""

from __future__ import annotations

from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest

from tests.agents import search_index, steps_after
from tests.distributed.cases import ResumeCase
from tests.distributed.launch import launch

pytestmark = pytest.mark.distributed
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="no DeepSpeed")
WITHIN_A_CYCLE = {1: True, 4: False, 5: True}
"""Of the steps that are resumed; 4 ends an epoch, and 5 lies in the first of the second epoch's two cycles."""


@pytest.mark.parametrize(
    ("config", "trainer", "target_kl"),
    [
        ("ddp_cpu", "so_grpo", 1e-4),
        ("fsdp2_cpu", "so_ppo", 1e-4),
        pytest.param("zero2_cpu", "so_ppo", 1e-4, marks=needs_deepspeed),
        pytest.param("zero3_cpu", "so_grpo", 0.0, marks=needs_deepspeed),
    ],
)
def test_checkpoints_continue_exactly(tmp_path: Path, config: str, trainer: str, target_kl: float) -> None:
    search_index(tmp_path)
    case = ResumeCase(str(tmp_path), "exactly", trainer, list(WITHIN_A_CYCLE), target_kl)
    result = launch(config, case, worker="tests.distributed.resume_worker")
    assert result["epoch"] > 1
    for step, resumed in result["resumed"].items():
        ours, theirs = (steps_after(int(step), run["logs"]) for run in (resumed, result))
        assert ours == theirs, f"resumed after step {step}"
        assert resumed["distance"] == 0.0, f"resumed after step {step}"
        assert resumed["kept"] == [WITHIN_A_CYCLE[int(step)]] * 2, f"step {step} is not where it is meant to be"
    if target_kl:
        assert min(log["lr_factor"] for log in result["logs"] if "lr_factor" in log) < 1
    assert max(log["grad_norm"] for log in result["logs"] if "grad_norm" in log) > 0


@pytest.mark.parametrize("config", ["ddp_cpu", pytest.param("zero2_cpu", marks=needs_deepspeed)])
def test_an_engine_that_is_gone_for_one_process_leaves_a_checkpoint_of_both(tmp_path: Path, config: str) -> None:
    search_index(tmp_path)
    result = launch(config, ResumeCase(str(tmp_path), "without an engine"), worker="tests.distributed.resume_worker")
    for order, found in result.items():
        assert found["message"] == [f"connection refused. Resume from {tmp_path / order / 'checkpoint-3'}."] * 2
        asked, whole = ([[*chain(*process)] for process in found[name]] for name in ("asked", "whole"))
        assert len(whole[0]) == 6 * 4
        if order == "completed":  # which decides what is next, but not what is left
            asked, whole = ([sorted(process) for process in each] for each in (asked, whole))
        assert asked == whole
