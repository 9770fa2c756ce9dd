"""Every pair of switches in two processes: the rows of `tests/switch_pairs.py`, in one launch for each engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.cases import ArrayCase
from tests.distributed.launch import launch
from tests.switch_pairs import ARRAY, SPLIT_BY_TRL
from tests.switch_runs import World
from tests.switches import FACTORS

OF_A_CLOCK = ("time", "runtime", "per_second")
"""In the names of what each process measures for itself."""
SAMPLED = ("search",)
"""Engines whose trajectories depend on the generator of the process that samples them."""


def logged(metrics: dict[str, Any]) -> str:
    """As text, in which one NaN is like another."""
    return repr({name: value for name, value in metrics.items() if not any(word in name for word in OF_A_CLOCK)})


@pytest.mark.distributed
@pytest.mark.parametrize("engine", FACTORS["engine"])
def test_ranks_agree_and_train_as_one_process(tmp_path: Path, engine: str) -> None:
    launch("ddp_cpu", ArrayCase(str(tmp_path), engine), timeout_s=400, worker="tests.distributed.array_worker")
    first, second = (torch.load(tmp_path / f"rank_{rank}.pt", weights_only=True) for rank in range(2))
    assert first.keys() == {number for number, row in enumerate(ARRAY) if row["engine"] == engine}
    alone = World(tmp_path / "alone", engine)
    for number, (gradients, metrics) in first.items():
        theirs, others = second[number]
        assert all(map(torch.equal, gradients, theirs)), f"row {number}"
        assert logged(metrics) == logged(others), f"row {number}"
        assert all(gradient.isfinite().all() for gradient in gradients), f"row {number}"
        if engine in SAMPLED or ARRAY[number]["loss"] in SPLIT_BY_TRL:
            continue
        whole = alone.train(ARRAY[number], tmp_path / "alone").gradients
        for ours, expected in zip(gradients, whole, strict=True):
            tolerance = 2e-5 * max(expected.abs().max().item(), 0.1)
            assert torch.allclose(ours, expected, rtol=1e-4, atol=tolerance), f"row {number}"
