"""What is no mistake of the policy's is no bad reward."""

from __future__ import annotations

import urllib.request
from typing import Any

import pytest

from sorl_trl.endpoint.conversation import Conversation
from tests.scripted import run_agent
from tests.tools import qwen_tokenizer


def test_a_defect_of_the_endpoint_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(self: Any, request: Any) -> Any:
        raise LookupError("a defect")

    def agent(example: Any, endpoint: Any) -> float:
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        body = b'{"messages": [{"role": "user", "content": "Where is Oslo?"}]}'
        urllib.request.urlopen(urllib.request.Request(f"{endpoint.base_url}/chat/completions", body, headers))
        return 1.0

    monkeypatch.setattr(Conversation, "begin", begin)
    with pytest.raises(RuntimeError, match="endpoint failed: LookupError"):
        run_agent(agent, {}, qwen_tokenizer(), lambda read, number: "In Norway.")
