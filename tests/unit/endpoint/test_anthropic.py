"""Anthropic's Messages API, without its SDK: what it reads, writes, counts and refuses."""

from __future__ import annotations

import json
import socket
from itertools import pairwise
from typing import Any

import httpx2
import pytest

from sorl_trl.endpoint import Access, anthropic, server
from sorl_trl.types import StopReason
from tests.endpoint import HI, Ran, ask, chat_of, collect, run_agent, tokenizer_of, without_a_rollout
from tests.tools import HOSTILE

TOOL = {"name": "search", "input_schema": {"type": "object", "properties": {"query": {"type": "string"}}}}
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Oslo"}}\n</tool_call>'
BODY: dict[str, Any] = {"model": "m", "max_tokens": 500, "messages": HI, "tools": [TOOL]}


def post(access: Access, body: Any, path: str = "messages", **headers: str) -> httpx2.Response:
    given = headers or {"x-api-key": access.api_key}
    return httpx2.post(f"{access.base_url}/{path}", content=json.dumps(body), headers=given, timeout=60)


def events(response: httpx2.Response) -> list[dict[str, Any]]:
    parts = [part.split("\n") for part in response.text.strip().split("\n\n")]
    told = [json.loads(data.removeprefix("data: ")) for _, data in parts]
    assert [name for name, _ in parts] == [f"event: {each['type']}" for each in told]
    return told


def played(say: Any, family: str = "qwen3", results: str = "found", **more: Any) -> Ran:
    """An agent that calls twice, counts before each call, and sends back what it got."""

    def agent(example: Any, endpoint: Access) -> float:
        messages = [*HI]
        for number in range(3):
            body = {**BODY, "messages": messages, **more}
            counted = post(endpoint, body, "messages/count_tokens").json()
            reply = post(endpoint, body).raise_for_status().json()
            assert counted == {"input_tokens": reply["usage"]["input_tokens"]}
            calls = [each for each in reply["content"] if each["type"] == "tool_use"]
            answers = [{"type": "tool_result", "tool_use_id": each["id"], "content": results} for each in calls]
            more_text = [{"type": "text", "text": f"more {number}"}] * (not answers)
            messages += [
                {"role": "assistant", "content": reply["content"]},
                {"role": "user", "content": [*answers, *more_text]},
            ]
        return float(len(messages))

    return run_agent(agent, {}, tokenizer_of(family), say)


@pytest.mark.parametrize(
    "written",
    [
        "<think>\nI see.\n</think>\n\nI look.\n" + CALL,
        CALL,
        f"{CALL}\n{CALL}",
        CALL.replace('{"query": "Oslo"}', '"5"'),
    ],
)
def test_a_conversation_goes_on_with_what_the_api_returned(written: str) -> None:
    """And counting leaves no trace in it."""
    ran = played(lambda read, number: written)
    assert sum(ran.counts) == 2 and ran.counts[2] == 0
    assert all(later.startswith(before) for before, later in pairwise(ran.read))


def test_hostile_results_write_no_control_tokens() -> None:
    harmless, hostile = (played(lambda read, number: CALL, results=text) for text in ("found", HOSTILE))
    special = {*tokenizer_of("qwen3").all_special_ids}
    shown = [[each for each in ran.engine.asked[-1][1] if each in special] for ran in (harmless, hostile)]
    assert shown[0] == shown[1]
    assert hostile.metrics["rollout/neutralized_per_trajectory"] == 2


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "search"}])
@pytest.mark.parametrize("family", ["qwen2_5", "gemma"])
def test_a_demanded_call_is_begun_for_the_policy(family: str, choice: dict[str, str]) -> None:
    """Its beginning is read, not sampled, and the call continues like any other."""
    written = CALL.replace("<tool_call>\n", "<tool_call>") if family == "gemma" else CALL
    ran = played(lambda read, number: written, family, tools=[TOOL, {**TOOL, "name": "look"}], tool_choice=choice)
    begun = '"arguments": {' if "name" in choice else '{"name": "'
    assert all(read.endswith(begun) for read in ran.read)
    assert not any("<tool_call>" in turn.text for turn in ran.trajectory.turns)
    assert [turn.action.calls[0].tool for turn in ran.trajectory.turns] == ["search"] * 3
    assert ran.counts[2] == 0


def test_a_policy_that_thinks_first_is_not_forced(caplog: pytest.LogCaptureFixture) -> None:
    ran = played(lambda read, number: "Yes.", tool_choice={"type": "any"})
    assert all(read.endswith("<|im_start|>assistant\n") for read in ran.read)
    assert caplog.text.count("`tool_choice`") == 1


def test_the_events_of_a_stream() -> None:
    def agent(example: Any, endpoint: Access) -> float:
        told = events(post(endpoint, {**BODY, "stream": True}, Authorization=f"Bearer {endpoint.api_key}"))
        parts = {"start": "content_block_start", "delta": "content_block_delta", "stop": "content_block_stop"}
        kinds = [each["type"] for each in told]
        block = [parts["start"], parts["delta"], parts["stop"]]
        thoughts = [parts["start"], parts["delta"], parts["delta"], parts["stop"]]
        assert kinds == ["message_start", "ping", *thoughts, *block, *block, "message_delta", "message_stop"]
        assert [each["index"] for each in told if "index" in each] == [0] * 4 + [1] * 3 + [2] * 3
        deltas = [each["delta"] for each in told if each["type"] == parts["delta"]]
        assert (deltas[0]["thinking"], deltas[2]["text"]) == ("I see.", "I look.")
        assert json.loads(deltas[3]["partial_json"]) == {"query": "Oslo"}
        assert told[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        return 1.0

    written = f"<think>\nI see.\n</think>\n\nI look.\n{CALL}"
    assert run_agent(agent, {}, tokenizer_of("qwen3"), lambda *_: written).rewards == {"reward": 1.0}


def test_how_a_turn_ended() -> None:
    def agent(example: Any, endpoint: Access) -> float:
        cut = post(endpoint, {**BODY, "max_tokens": 2}).json()
        stopped = post(endpoint, {**BODY, "stop_sequences": ["ll", "x"]}).json()
        ended = post(endpoint, BODY).json()
        found = [
            (each["content"][0]["text"], each["stop_reason"], each["stop_sequence"]) for each in (cut, stopped, ended)
        ]
        assert found == [("He", "max_tokens", None), ("He", "stop_sequence", "ll"), ("Hello.", "end_turn", None)]
        return 1.0

    output, *_ = collect(agent, 1)
    assert output["agent_rewards"] == [{"reward": 1.0}]


def test_blocks_are_messages() -> None:
    block = {"type": "text", "cache_control": {"type": "ephemeral"}}
    body = {
        **BODY,
        "system": [
            {**block, "text": f"{anthropic._BILLING} cch=1;"},
            {**block, "text": "Be"},
            {**block, "text": "kind."},
        ],
        "messages": [
            {"role": "user", "content": [{**block, "text": "hi"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I see.", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "I look."},
                    *({"type": "tool_use", "id": name, "name": "search", "input": {}} for name in "ab"),
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "and"},
                    {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "found b"}]},
                    {"type": "tool_result", "tool_use_id": "a", "content": "found a", "is_error": True},
                ],
            },
        ],
    }
    request = anthropic.read(body)
    assert [(each["role"], each["content"]) for each in request.messages] == [
        ("system", "Be\n\nkind."),
        ("user", "hi"),
        ("assistant", "I look."),
        ("tool", "found a"),
        ("tool", "found b"),
        ("user", "and"),
    ]
    assert request.messages[2]["reasoning_content"] == "I see."
    assert (request.limit, request.tools[0]["function"]["parameters"]) == (500, TOOL["input_schema"])


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "the policy reads only text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "content": [IMAGE]}]}]}, "only text"),
        ({"messages": [*HI, {"role": "assistant", "content": "{"}]}, "continues no message"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content"),
        ({"messages": []}, "`messages`"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}, *HI]}, "a `name`"),
        ({"system": 5}, "`system`"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        (
            {"tools": [{"type": "bash_1", "name": "bash"}, {"type": "computer", "name": "c"}]},
            "'bash_1' (bash), 'computer'",
        ),
        ({"tool_choice": {"type": "tool", "name": "other"}}, "`tool_choice` is 'other'"),
        ({"tool_choice": "any"}, "`tool_choice`"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"x": json.loads("[" * 200 + "]" * 200)}, "128 levels"),
    ],
)
def test_what_is_not_served_is_refused_in_a_line(body: dict[str, Any], words: str) -> None:
    with without_a_rollout() as access:
        response = post(access, {**BODY, **body})
    told = response.json()
    assert (response.status_code, told["type"], told["error"]["type"]) == (400, "error", "invalid_request_error")
    assert words in told["error"]["message"] and "\n" not in told["error"]["message"]
    assert response.headers["x-should-retry"] == "false"


def test_keys_paths_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    with without_a_rollout() as access:
        monkeypatch.setattr(server, "_MOST_BYTES", 1000)
        large = post(access, {**BODY, "messages": [{"role": "user", "content": "x" * 10**6}]})
        wrong = post(access, BODY, **{"x-api-key": "sk-1"})
        missing = post(access, BODY, "messages/batches")
        health = httpx2.get(access.base_url.replace("/v1", "/health"), headers={"Origin": "http://x"})
        page = httpx2.options(f"{access.base_url}/messages", headers={"Origin": "http://x"})
        again = post(access, {**BODY, "messages": []}, "v1/messages")
    over = post(access, BODY)
    found = [(each.status_code, each.json()["error"]["type"]) for each in (large, wrong, again, over)]
    assert found == [
        (413, "request_too_large"),
        (401, "authentication_error"),
        (400, "invalid_request_error"),
        (403, "permission_error"),
    ]
    assert (missing.status_code, health.status_code, health.json()) == (404, 200, {"status": "ok"})
    assert page.status_code == 401
    assert not any("access-control" in name for each in (health, page) for name in each.headers)


def test_a_full_context_is_said_in_the_words_that_clients_know() -> None:
    def agent(example: Any, endpoint: Access) -> float:
        refused = post(endpoint, {**BODY, "messages": [{"role": "user", "content": "x" * 900}], "tools": []})
        return float(refused.json()["error"]["message"].startswith("prompt is too long: "))

    output, *_ = collect(agent, 1, window=300)
    assert output["agent_rewards"] == [{"reward": 1.0}]


def test_a_stream_that_its_client_drops_and_a_body_that_never_comes_cost_no_other_trajectory() -> None:
    async def agent(example: Any, endpoint: Access) -> float:
        if example["i"]:
            return float(await ask(endpoint, "hi") == "Hello.")
        address = ("127.0.0.1", int(endpoint.base_url.split(":")[2].removesuffix("/v1")))
        head = f"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-api-key: {endpoint.api_key}\r\ncontent-length: "
        body = json.dumps({**BODY, "stream": True, "tools": []})
        with socket.create_connection(address) as begun, socket.create_connection(address) as dropped:
            begun.sendall(f"{head}999999\r\n\r\n{{".encode())
            dropped.sendall(f"{head}{len(body)}\r\n\r\n{body}".encode())
        await ask(endpoint, "again")
        return 0.5

    output, *_ = collect(agent, 3)
    assert output["agent_rewards"] == [{"reward": 0.5}, {"reward": 1.0}, {"reward": 1.0}]
    assert [each.stop_reason for each in output["trajectory"]] == [StopReason.ENVIRONMENT_DONE] * 3


def test_every_template_that_parses_calls_has_a_beginning_of_them_or_thoughts() -> None:
    tools = [{"type": "function", "function": {"name": "search", "description": "x", **TOOL}}]
    for family in ("qwen2_5", "gemma", "llama3_2"):
        assert '"search"' in chat_of(family).opening(HI, tools, ["search"])
    for family in ("qwen3", "qwen3_training", "gptoss", "glm4moe"):
        assert not chat_of(family).opening(HI, tools, ["search"])
