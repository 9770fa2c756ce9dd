"""`sorl serve-policy`, as a process of its own: what it prints leads an agent to the policy."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from itertools import islice
from pathlib import Path
from threading import Timer
from typing import Any
from urllib.request import Request, urlopen

import pytest

from sorl_trl.cli.main import main
from tests.policies import CHAT, acting_policy, acting_tokenizer


def save_run(folder: Path, chat_template: str | None) -> None:
    tokenizer = acting_tokenizer(("guess",))
    tokenizer.chat_template = chat_template
    acting_policy(tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "recipe.yaml").write_text("max_turn_tokens: 3\n")


def reply(base_url: str, api_key: str) -> Any:
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "<guess>"}]}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urlopen(Request(f"{base_url}/chat/completions", body, headers), timeout=60) as response:
        return json.load(response)


@pytest.mark.trains
def test_a_run_is_served_with_its_recipe_until_it_is_interrupted(tmp_path: Path) -> None:
    save_run(tmp_path / "run", CHAT)
    words = ["serve-policy", str(tmp_path / "run"), "--port", "0", "--api_key", "secret", "--temperature", "0"]
    command = [sys.executable, "-m", "sorl_trl.cli.main", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        limit = Timer(300, server.kill)  # if it prints nothing
        limit.start()
        try:
            exports = islice((line for line in server.stdout if line.startswith("export ")), 2)
            printed = dict(line.removeprefix("export ").strip().split("=") for line in exports)
            replies = [reply(printed["OPENAI_BASE_URL"], printed["OPENAI_API_KEY"]) for _ in range(8)]
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 0
        finally:
            limit.cancel()
            server.kill()
    assert printed["OPENAI_API_KEY"] == "secret"
    assert [each["usage"]["completion_tokens"] for each in replies] == [3] * 8, "as set in the recipe"
    said = [each["choices"][0]["message"]["content"] for each in replies]
    assert len({*said}) == 1, "greedy"


@pytest.mark.parametrize(
    ("address", "named"),
    [(("127.0.0.1", "taken"), "`--port` is"), (("192.0.2.1", "0"), "`host` is '192.0.2.1'")],
)
def test_an_address_that_is_not_available_is_noticed_before_the_policy_is_loaded(
    address: tuple[str, str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run(tmp_path / "run", CHAT)
    (tmp_path / "run" / "model.safetensors").unlink()
    with socket.create_server(("127.0.0.1", 0)) as other:
        host, port = address[0], address[1].replace("taken", str(other.getsockname()[1]))
        assert main(["serve-policy", str(tmp_path / "run"), "--host", host, "--port", port]) == 2
    assert named in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["nowhere/at/all"], "nowhere/at/all"),
        (["run"], "run has no chat template"),
        (["run", "--port", "65536"], "--port"),
        (["run", "--temperature", "-1"], "`temperature` is -1.0"),
        (["run", "--rollout_engine", "fast"], "`rollout_engine` is 'fast'"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_run(tmp_path / "run", None)
    assert main(["serve-policy", *words]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert named in line
