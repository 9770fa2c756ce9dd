"""What is no mistake of the policy's is no bad reward."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest

from sorl_trl.endpoint.conversation import Conversation
from tests.endpoint import SEARCH, run_agent
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


def test_a_defect_of_the_endpoint_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(self: Any, request: Any) -> Any:
        raise LookupError("a defect")

    monkeypatch.setattr(Conversation, "begin", begin)
    with pytest.raises(RuntimeError, match="endpoint failed: LookupError"):
        run_agent(asking(), {}, qwen_tokenizer(), answer)


def test_tools_need_a_tokenizer_that_reads_calls() -> None:
    """Otherwise no call would ever reach the agent."""
    tokenizer = qwen_tokenizer()
    assert run_agent(asking(tools=[SEARCH]), {}, tokenizer, answer).rewards == {"reward": 1.0}
    unknown = qwen_tokenizer()
    unknown.chat_template += "{# changed #}"
    assert run_agent(asking(), {}, unknown, answer).rewards == {"reward": 1.0}
    with pytest.raises(ValueError, match="response_template"):
        run_agent(asking(tools=[SEARCH]), {}, unknown, answer)
    unknown.response_template = tokenizer.response_template
    assert run_agent(asking(tools=[SEARCH]), {}, unknown, answer).rewards == {"reward": 1.0}
