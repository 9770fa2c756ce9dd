"""Anthropic's SDK, whole and streamed, in a thread and in a loop: the loop of its guide to tool use."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.endpoint import collect, run_agent
from tests.sdks.test_contexts import family_tokenizer, written

TOOL = {
    "name": "search",
    "description": "Search the atlas.",
    "input_schema": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
}


async def whole(client: Any, **body: Any) -> Any:
    return await client.messages.create(**body)


async def streamed(client: Any, **body: Any) -> Any:
    async with client.messages.stream(**body) as stream:
        text = "".join([part async for part in stream.text_stream])
        message = await stream.get_final_message()
    assert text == "".join(each.text for each in message.content if each.type == "text")
    return message


async def in_thread(client: Any, **body: Any) -> Any:
    return await asyncio.to_thread(client.messages.create, **body)


async def in_thread_streamed(client: Any, **body: Any) -> Any:
    def ask() -> Any:
        with client.messages.stream(**body) as stream:
            return stream.get_final_message()

    return await asyncio.to_thread(ask)


ASKED = {"whole": whole, "streamed": streamed, "sync": in_thread, "sync, streamed": in_thread_streamed}


@pytest.mark.parametrize("style", ["as the template", "compact JSON", "two calls", "thoughts"])
@pytest.mark.parametrize("name", ASKED)
def test_the_loop_of_tool_use(name: str, style: str, search: Any) -> None:
    """What training reads is what the policy read (`run_agent`), and a count is what it will read."""
    import anthropic

    async def agent(example: Any, endpoint: Any) -> float:
        kind = anthropic.Anthropic if name.startswith("sync") else anthropic.AsyncAnthropic
        client: Any = kind(base_url=endpoint.base_url, api_key=endpoint.api_key)
        messages: list[Any] = [{"role": "user", "content": "Where is Oslo?"}]
        body: dict[str, Any] = {"model": "policy", "system": "Answer.", "tools": [TOOL], "messages": messages}
        while True:
            counting = client.messages.count_tokens(**body)
            counted = counting if name.startswith("sync") else await counting
            reply = await ASKED[name](client, max_tokens=1000, **body)
            assert reply.usage.input_tokens == counted.input_tokens and reply.usage.output_tokens > 0
            messages.append({"role": "assistant", "content": reply.content})
            calls = [each for each in reply.content if each.type == "tool_use"]
            if reply.stop_reason != "tool_use":
                assert not calls and reply.stop_reason == "end_turn"
                return float("Norway" in reply.content[-1].text)
            results = [
                {"type": "tool_result", "tool_use_id": each.id, "content": search(each.input["query"])}
                for each in calls
            ]
            messages.append({"role": "user", "content": results})

    family = "qwen3" if style == "thoughts" else "qwen2_5"
    ran = run_agent(agent, {}, family_tokenizer(family), lambda read, number: written(family, style, number))
    assert ran.rewards == {"reward": 1.0}
    assert ran.counts == ((0, 2, 0) if style == "compact JSON" else (2, 0, 0))


def test_a_refusal_is_final_and_named() -> None:
    import anthropic

    def agent(example: Any, endpoint: Any) -> float:
        with anthropic.Anthropic(base_url=endpoint.base_url, auth_token=endpoint.api_key) as client:
            ask: Any = client.messages.create
            long = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x " * 500}]}
            with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
                ask(**long)
        client = anthropic.Anthropic(base_url=endpoint.base_url, api_key="other")
        with client, pytest.raises(anthropic.AuthenticationError, match="unknown API key"):
            client.messages.count_tokens(model="m", messages=[{"role": "user", "content": "x"}])
        return 1.0

    assert collect(agent, 1, window=300)[0]["agent_rewards"] == [{"reward": 1.0}]
