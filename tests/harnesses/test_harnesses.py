"""Harnesses as they are, with a scripted policy: each mends a file in a temporary folder, and ends at every limit.

What a harness runs here is what the script writes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from sorl_trl.endpoint import command_agent
from sorl_trl.types import StopReason
from tests.documentation import ROOT
from tests.endpoint import END, Ran, collect, end_time_limits, run_agent
from tests.harnesses.conftest import COMMANDS
from tests.tools import qwen_tokenizer, tool_call

TASK = json.loads((ROOT / "examples/harnesses/tasks.jsonl").read_text().splitlines()[0])
LOOK = "cat median.py"
MEND = "printf 'from statistics import median\\n' > median.py; python3 -m unittest 2>&1 | tail -1"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
MARK = "98765.4321"
"""The seconds that a process of the policy's sleeps, by which it is found."""
LEAVE = f"(setsid sleep {MARK} >/dev/null 2>&1 &)"


@dataclass(frozen=True)
class Harness:
    """How a harness's policy runs a command, and how it ends."""

    tool: str
    argument: str = "command"
    end: str | None = None

    def call(self, command: str) -> str:
        return tool_call(self.tool, **{self.argument: command, "description": "a command"})

    def says(self, *commands: str) -> Callable[[str, int], str]:
        """Runs the commands one by one, and ends."""
        calls = [self.call(each) for each in commands]
        calls[1:] = [each.replace('{"name": ', '{"name":') for each in calls[1:]]
        last = self.call(self.end) if self.end else "The tests pass."
        return lambda read, number: [*calls, last][min(number, len(calls))]


HARNESSES = {
    "mini": Harness("bash", end=SUBMIT),
    "opencode": Harness("bash"),
    "claude_code": Harness("Bash"),
    "codex": Harness("exec_command", "cmd"),
    "qwen_code": Harness("run_shell_command"),
}


@pytest.fixture(autouse=True)
def commands(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The harnesses on the path. At the end, no process of theirs is left, nor one that the policy started."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", os.pathsep.join([os.environ["PATH"], str(COMMANDS), str(Path(sys.executable).parent)]))
    yield
    for _ in range(100):  # an agent whose time is up is not waited for
        if not (left := [*running(), *sleeping()]):
            break
        time.sleep(0.1)
    for each in sleeping():
        os.kill(each, signal.SIGKILL)
    assert not left


def running() -> list[int]:
    children = psutil.Process().children(recursive=True)
    return [each.pid for each in children if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def sleeping() -> list[int]:
    return [each.pid for each in psutil.process_iter(["cmdline"]) if MARK in (each.info["cmdline"] or ())]


def agent_of(name: str) -> Any:
    return command_agent(f"{sys.executable} -m examples.harnesses.{name}")


def run(name: str, *commands: str, row: Any = TASK, **limits: int) -> Ran:
    return run_agent(agent_of(name), row, qwen_tokenizer(), HARNESSES[name].says(*commands), turn=4000, **limits)


@pytest.mark.parametrize("name", HARNESSES)
def test_a_harness_mends_the_code(name: str) -> None:
    """What was read before each turn is what training reads (`run_agent`), and no request begins a context.

    The second call is written with other spaces than the chat template's, so the third request is spliced.
    """
    ran = run(name, LOOK, MEND)
    assert (ran.rewards, ran.counts) == ({"reward": 1.0}, (1, 1, 0))
    assert "return sorted(values)" in ran.read[1]
    assert "OK" in ran.read[2][len(ran.read[1]) :]


@pytest.mark.parametrize("name", HARNESSES)
def test_what_is_left_running_ends_with_the_harness(name: str) -> None:
    """And a task that is not solved earns nothing, whatever the policy makes of its tests."""
    ran = run(name, f"{LEAVE}; echo > test_median.py")
    assert ran.rewards == {"reward": 0.0}


@pytest.mark.parametrize("name", HARNESSES)
def test_its_own_time_limit_ends_it(name: str) -> None:
    forever = [f"{LEAVE}; sleep {MARK}"] * 9  # Codex waits for ten seconds, and then asks again
    ran = run(name, *forever, row={**TASK, "limit_s": 15})
    assert ran.rewards == {"reward": 0.0}


@pytest.mark.parametrize("name", HARNESSES)
def test_a_full_trajectory_ends_it(name: str) -> None:
    """The endpoint refuses the second call, because nothing fits any more; no harness asks for ever."""
    ran = run(name, f"{LEAVE}; {LOOK}", LOOK, trajectory=200)
    assert ran.trajectory.stop_reason is StopReason.TRAJECTORY_LIMIT


@pytest.mark.parametrize("name", HARNESSES)
def test_the_time_limit_of_agents_ends_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    end_time_limits(monkeypatch, lambda: bool(sleeping()))
    tokenizer, says = qwen_tokenizer(), HARNESSES[name].says(f"{LEAVE}; sleep {MARK}")
    output, _, _ = collect(agent_of(name), [TASK], lambda row, ids: says("", 0) + END, turn=4000, tokenizer=tokenizer)
    assert output["agent_rewards"] == [None]


def test_mini_swe_agent_in_this_process() -> None:
    from examples.harnesses.mini_swe_agent import agent

    harness = HARNESSES["mini"]
    ran = run_agent(agent, TASK, qwen_tokenizer(), harness.says(LOOK, MEND), turn=4000)
    assert (ran.rewards, ran.counts) == ({"reward": 1.0}, (1, 1, 0))
