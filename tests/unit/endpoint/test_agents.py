"""Agents in processes of their own, and what the arguments of a rollout may be."""

from __future__ import annotations

import shlex
import socket
import sys
from threading import Thread
from typing import Any

import pytest

from sorl_trl.endpoint import AgentMistake, EndpointRollout, command_agent
from sorl_trl.types import StopReason
from tests.endpoint import collect, end_time_limits

CALL = """
import json, os, sys, urllib.request
example = json.load(sys.stdin)
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
body = json.dumps({"messages": [{"role": "user", "content": example["prompt"]}]}).encode()
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


def python(code: str) -> Any:
    return command_agent(f"{shlex.quote(sys.executable)} -c {shlex.quote(code)}")


@pytest.mark.trains
@pytest.mark.parametrize(
    ("line", "rewards", "reason"),
    [
        ("print('a log'); print(len(answer))", {"reward": 6.0}, StopReason.ENVIRONMENT_DONE),
        ('print(json.dumps({"right": 1, "short": 0.5}))', {"right": 1.0, "short": 0.5}, StopReason.ENVIRONMENT_DONE),
        ("print('null')", None, StopReason.ENVIRONMENT_DONE),
        ("", None, StopReason.ENVIRONMENT_DONE),
        ("print(1); sys.exit('no luck')", {"reward": 0.0}, StopReason.AGENT_ERROR),
        ("os.kill(os.getpid(), 9)", {"reward": 0.0}, StopReason.AGENT_ERROR),
    ],
)
def test_a_command_prints_its_reward_in_its_last_line(
    line: str, rewards: Any, reason: StopReason, caplog: pytest.LogCaptureFixture
) -> None:
    output, *_ = collect(python(CALL + line))
    assert output["agent_rewards"] == [rewards]
    assert (output["trajectory"][0].stop_reason, len(output["trajectory"][0].turns)) == (reason, 1)
    assert ("exit code 1: no luck" in caplog.text) == ("no luck" in line)
    assert ("signal 9: it wrote nothing" in caplog.text) == ("kill" in line)


@pytest.mark.trains
def test_mistakes_of_a_command_are_raised() -> None:
    with pytest.raises(AgentMistake, match="'done'"):
        collect(python("print('done')"))
    with pytest.raises(AgentMistake, match=r"ended with exit code 1: .*ModuleNotFoundError"):
        collect(python("import nowhere"))
    for command in ("", "'", "no-such-program"):
        with pytest.raises(ValueError, match="`agent_command`"):
            command_agent(command)


@pytest.mark.trains
@pytest.mark.parametrize("in_own_session", [False, True])
def test_the_time_limit_ends_a_command_and_what_it_has_started(
    in_own_session: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(60.0)
        connected: list[socket.socket] = []
        accepts = Thread(target=lambda: connected.extend(listening.accept()[0] for _ in range(2)))
        accepts.start()
        end_time_limits(monkeypatch, lambda: not accepts.is_alive())
        connect = f"import socket, time; s = socket.create_connection({listening.getsockname()}); time.sleep(600)"
        session = f"start_new_session={in_own_session}"
        start = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {connect!r}], {session})"
        output, *_ = collect(python(f"{start}; {connect}"))
        assert output["trajectory"][0].stop_reason is StopReason.ENVIRONMENT_UNAVAILABLE
        assert len(connected) == 2
        for process in connected:
            process.settimeout(30.0)
            assert process.recv(1) == b"", "it has ended"
            process.close()


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("agent", "agent.py", TypeError),
        ("max_turn_tokens", 0, ValueError),
        ("time_limit_s", 0, ValueError),
        ("reward_on_error", float("nan"), ValueError),
        ("engine", "slots", TypeError),
    ],
)
def test_arguments(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=name):
        EndpointRollout(**{"agent": print, name: value})
