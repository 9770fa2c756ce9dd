"""What is no mistake of the policy's is no bad reward."""

from __future__ import annotations

import json
import threading
import urllib.request
from typing import Any
from urllib.error import HTTPError

import pytest

from sorl_trl.endpoint.conversation import Conversation
from tests.endpoint import collect, run_agent
from tests.tools import qwen_tokenizer


def asking(**fields: Any) -> Any:
    """An agent that asks once, without an SDK."""
    body = json.dumps({"messages": [{"role": "user", "content": "Where is Oslo?"}], **fields}).encode()

    def agent(example: Any, endpoint: Any) -> float:
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        urllib.request.urlopen(urllib.request.Request(f"{endpoint.base_url}/chat/completions", body, headers))
        return 1.0

    return agent


def answer(read: str, number: int) -> str:
    return "In Norway."


@pytest.mark.parametrize("mistake", ["request", "defect", "reward"])
def test_nothing_is_waited_for_after_a_mistake(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    is_over, has_ended = threading.Event(), threading.Event()

    def agent(example: Any, endpoint: Any) -> Any:
        if example["i"]:
            is_over.wait(30)
            has_ended.set()
            return None
        if mistake != "reward":
            asking(n=200 if mistake == "request" else 1)(example, endpoint)
        return "a text"

    if mistake == "defect":
        monkeypatch.setattr(Conversation, "begin", None)
    with pytest.raises(RuntimeError, match={"request": "`n`", "defect": "TypeError", "reward": "a text"}[mistake]):
        collect(agent, 2)
    assert not has_ended.is_set()
    is_over.set()


def test_a_path_that_is_not_served_is_the_agents_mistake() -> None:
    def agent(example: Any, endpoint: Any) -> float:
        asking()(example, endpoint)
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        urllib.request.urlopen(urllib.request.Request(f"{endpoint.base_url}/embeddings", b"{}", headers))
        return 1.0

    with pytest.raises(ValueError, match="/v1/embeddings is not supported"):
        run_agent(agent, {}, qwen_tokenizer(), answer)


def test_a_body_that_nests_too_deeply_costs_its_trajectory() -> None:
    def agent(example: Any, endpoint: Any) -> float:
        asking()(example, endpoint)
        if example["i"]:
            return 1.0
        nested = "[" * 900 + "]" * 900
        body = f'{{"messages": [{{"role": "user", "content": "hi"}}], "tools": {nested}}}'.encode()
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        with pytest.raises(HTTPError, match="400"):
            urllib.request.urlopen(urllib.request.Request(f"{endpoint.base_url}/chat/completions", body, headers))
        raise ValueError("an agent's error")

    output, *_ = collect(agent, 2)
    assert output["agent_rewards"] == [{"reward": 0.0}, {"reward": 1.0}]
