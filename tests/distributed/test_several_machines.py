"""Two launches with machine ranks 0 and 1 on one machine, as two machines are launched.

They search by the server, a process of its own, and train as one process does. And each has a folder of its own, as
machines have that share no storage.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.agents import search_index, steps_after
from tests.distributed.cases import SCRIPTS, Case, ResumeCase, taught_policy
from tests.distributed.launch import launch_on_machines
from tests.distributed.outcomes import assert_as_alone, assert_loads_plainly

pytestmark = pytest.mark.distributed
SERVE = "from sorl_trl.search.commands import serve; serve()"
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
both_engines = pytest.mark.parametrize(
    "config", ["ddp_two_machines_cpu", pytest.param("zero3_two_machines_cpu", marks=needs_deepspeed)]
)
# Each rank has one question: both search, a different number of times.
BOTH_SEARCH = (
    "where rome <search> rome </search> <information> where rome </information> <answer> rome </answer>",
    SCRIPTS[1],
)


@pytest.fixture
def case(tmp_path: Path) -> Case:
    taught_policy(tmp_path / "policy", BOTH_SEARCH)
    search_index(tmp_path)
    # At the usual rate of 1, four steps multiply the rounding of this policy to 3e-5.
    return Case(str(tmp_path), rollout="search", turn_rewards=True, no_baseline=True, options={"learning_rate": 0.2})


@pytest.fixture
def server(case: Case) -> Iterator[str]:
    """The URL of a search server over the case's index."""
    command = [sys.executable, "-c", SERVE, "--index", f"{case.folder}/index", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+/retrieve", line := process.stdout.readline())
        assert found, line
        yield found[0]
    finally:
        process.terminate()
        process.communicate(timeout=60)


@both_engines
def test_trains_as_one_process(case: Case, tmp_path: Path, server: str, config: str) -> None:
    options = {**case.options, "save_strategy": "steps", "save_steps": 4}
    on_server = replace(case, search_url=server, options=options)
    result = launch_on_machines(config, [on_server, on_server])
    assert (result["machines"], result["processes"]) == (2, 2)
    assert result["turns"] == [[2, 2], [3, 3]]
    assert_as_alone(case, result)
    assert_loads_plainly({tmp_path / "output" / "checkpoint-4": tmp_path / "weights.pt"})


def folders_of_two(folder: Path) -> list[Path]:
    """One on each machine."""
    folders = [folder / f"machine_{rank}" for rank in range(2)]
    for each in folders:
        each.mkdir()
        search_index(each)
    return folders


@both_engines
def test_machines_that_share_no_storage(tmp_path: Path, config: str) -> None:
    """A checkpoint in pieces is refused by all; checkpoints whose pieces are copied together continue exactly."""
    folders = folders_of_two(tmp_path)
    cases = [ResumeCase(str(folder), "without shared storage") for folder in folders]
    result = launch_on_machines(config, cases, worker="tests.distributed.resume_worker")
    for rank, text in enumerate(result["in_pieces"]):
        assert text.startswith(f"`resume_from_checkpoint` is '{folders[rank]}/output/checkpoint-1', but not all")
        assert "checkpoint-1 on process 0, none on process 1" in text
    resumed = result["resumed"]
    assert resumed["kept"] == [True, True]
    assert steps_after(1, resumed["logs"]) == steps_after(1, result["logs"])
    assert resumed["distance"] == 0.0
    # In the middle of a cycle of two steps: both collect at once, and again when the next cycle begins.
    assert [step for step in result["collects"] if step > 3] == [4, 6, 8]
