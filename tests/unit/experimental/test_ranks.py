"""Two processes decide together, and train as one does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.experimental.ranks import train, write_policy

pytestmark = pytest.mark.distributed


def launched(name: str, folder: Path) -> Any:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "tests.unit.experimental.ranks", name, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ})
    assert (folder / "found.pt").exists(), done.stderr[-4000:]  # processes now and then abort while they exit
    return torch.load(folder / "found.pt", weights_only=True)


@pytest.mark.parametrize("name", ["seeupo", "refill"])
def test_two_processes_train_as_one(tmp_path: Path, name: str) -> None:
    """One has first turns alone, and goes through the other's later turns with nothing; a group lies on both."""
    write_policy(tmp_path)
    alone, together = train(name, tmp_path), launched(name, tmp_path)
    for key, weight in alone["weights"].items():
        torch.testing.assert_close(together["weights"][key], weight, rtol=0, atol=1e-6)
    shown = ("seeupo/turn", "groups/refilled", "groups/refill_rounds", "groups/left", "loss")
    for ours, theirs in zip(together["logs"], alone["logs"], strict=True):
        assert {key: ours[key] for key in shown if key in ours} == pytest.approx(
            {key: theirs[key] for key in shown if key in theirs}, abs=1e-6
        )
    if name == "seeupo":
        assert [log["seeupo/turn"] for log in alone["logs"]] == [4, 3, 2, 1, 0] * 2
        means = [log["seeupo/multiplier_mean"] for log in alone["logs"] if log["seeupo/trajectories_with_turn"]]
        assert max(abs(mean - 1) for mean in means) > 0.001, "no multiplier has moved: a weak test"
    else:
        assert max(log.get("groups/refilled", 0.0) for log in alone["logs"]) > 0.0, "nothing was refilled: a weak test"
