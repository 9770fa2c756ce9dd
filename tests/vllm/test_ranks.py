"""Two processes under DDP, each with an engine of its own, or both with one server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.agents import search_index
from tests.distributed.launch import launch
from tests.vllm.policies import largest_difference, save_policy


@dataclass(frozen=True)
class Launch:
    """What the worker is told."""

    folder: str
    options: dict[str, Any]


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_two_ranks(tmp_path: Path, mode: str, request: pytest.FixtureRequest) -> None:
    options = {"vllm_mode": mode}
    if mode == "server":
        options["vllm_server_base_url"] = request.getfixturevalue("server")
    save_policy(tmp_path / "policy")
    search_index(tmp_path)  # here, because the ranks would build theirs in the same place
    result = launch("ddp_cpu", Launch(str(tmp_path), options), timeout_s=400.0, worker="tests.vllm.worker")
    assert result["engine"] == "DistributedDataParallel"
    assert largest_difference(result["gaps"]) < 1e-4
    assert result["moved"] > 1e-3 and result["spread"] == 0.0
    assert len(set(result["calls"])) == 1 and min(result["calls"]) > 4
    assert len({tuple(map(tuple, rank)) for rank in result["sampled"]}) == 2, "ranks sample for themselves"
