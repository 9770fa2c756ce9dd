"""Two processes: with an engine each, with one engine that is spread over both, with one server for both."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.agents import search_index
from tests.distributed.cases import ENGINES
from tests.distributed.launch import launch
from tests.vllm.policies import largest_difference, save_policy


@dataclass(frozen=True)
class Launch:
    """What the worker is told."""

    folder: str
    options: dict[str, Any]


needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


@pytest.mark.parametrize(
    ("mode", "config"),
    [
        *((mode, "ddp_cpu") for mode in ("colocate", "tensor_parallel", "server", "ahead")),
        *(pytest.param(mode, "zero3_cpu", marks=needs_deepspeed) for mode in ("colocate", "server", "ahead")),
        *((mode, "fsdp2_cpu") for mode in ("colocate", "ahead")),
    ],
)
def test_two_ranks(tmp_path: Path, mode: str, config: str, request: pytest.FixtureRequest) -> None:
    is_served = mode in ("server", "ahead")
    options: dict[str, Any] = {"vllm_mode": "server" if is_served else "colocate"}
    if is_served:
        options["vllm_server_base_url"] = request.getfixturevalue("server")
    if mode == "ahead":
        options["async_staleness"] = 1
    if mode == "tensor_parallel":
        options["vllm_tensor_parallel_size"] = 2
    save_policy(tmp_path / "policy", sharpness=4.0 if mode == "ahead" else 1.0)
    search_index(tmp_path)  # here, because the ranks would build theirs in the same place
    result = launch(config, Launch(str(tmp_path), options), timeout_s=400.0, worker="tests.vllm.worker")
    assert result.items() >= ENGINES[config].items()
    engine = "VLLMServerEngine" if is_served else "VLLMColocateEngine"
    assert result["engines"] == [[engine, mode == "tensor_parallel"]] * 2
    if mode == "ahead":
        first, *later = result["largest_ratios"]
        assert first < 1 + 1e-4 and max(later) > 1 + 1e-2, "later ones were sampled before an update"
    else:
        assert largest_difference(result["gaps"]) < 1e-4
    assert result["moved"] > 1e-3 and result["spread"] == 0.0
    assert min(map(len, result["sampled"])) > 4
    assert len({tuple(map(tuple, rank)) for rank in result["sampled"]}) == 2, "ranks sample for themselves"
