"""OpenAI's APIs, whole and streamed, as its SDK reads them, and what all APIs refuse."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import httpx2
import pytest
from openai import AuthenticationError, OpenAI, PermissionDeniedError
from pydantic import BaseModel

from sorl_trl.endpoint import Access, EndpointRollout, responses
from tests.endpoint import END, HI, SEARCH, ScriptedEngine, collect, tokenizer_of, without_a_rollout
from tests.tools import qwen_tokenizer

FUNCTION = {**SEARCH["function"], "strict": True}
TOOLS = {"chat": [{"type": "function", "function": FUNCTION}], "responses": [{"type": "function", **FUNCTION}]}
THINKS, CALL = (
    "<think>\nI see.\n</think>\n\n",
    '<tool_call>\n{"name": "search", "arguments": {"query": "ø"}}\n</tool_call>',
)
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": HI},
    "responses": {"model": "m", "input": "hi", "instructions": "Be kind."},
}
API = pytest.mark.parametrize("api", BODIES)
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])


def talk(agent: Callable[[OpenAI], Any], script: Any, **options: Any) -> Any:
    """What an agent finds out when it talks with a policy."""
    found: list[Any] = []

    def run(example: Any, endpoint: Access) -> None:
        with OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            found.append(agent(client))

    collect(run, script=script, tokenizer=tokenizer_of("qwen3"), **options)
    return found[0]


def create(client: OpenAI, api: str, streamed: bool, **more: Any) -> Any:
    place: Any = client.chat.completions if api == "chat" else client.responses
    body = {**BODIES[api], **more}
    if not streamed:
        return place.create(**body)
    with place.stream(**body) as events:
        return events.get_final_completion() if api == "chat" else events.get_final_response()


def create_events(place: Any, **body: Any) -> Any:
    return place.create(model="m", stream=True, **body)


def shown(response: Any) -> tuple[str, str, list[tuple[str, Any]], str]:
    """Text, thoughts, calls, and how the turn ended."""
    if hasattr(response, "choices"):
        message = response.choices[0].message
        calls = [(each.function.name, json.loads(each.function.arguments)) for each in message.tool_calls or ()]
        thoughts = getattr(message, "reasoning_content", None) or ""
        return message.content or "", thoughts, calls, response.choices[0].finish_reason
    calls = [(each.name, json.loads(each.arguments)) for each in response.output if each.type == "function_call"]
    thoughts = "".join(part.text for each in response.output if each.type == "reasoning" for part in each.summary)
    reason = response.incomplete_details.reason if response.incomplete_details else None
    return response.output_text, thoughts, calls, f"{response.status} {reason or ''}".strip()


@API
@STREAMED
@pytest.mark.parametrize(
    ("written", "text", "thoughts", "calls", "reason"),
    [
        (f"Yes. \n{END}", "Yes. \n", "", 0, "stop"),
        (f"{THINKS}Yes.{END}", "Yes.", "I see.", 0, "stop"),
        (f"{THINKS}I look.\n{CALL}\n{CALL}{END}", "I look.", "I see.", 2, "tool_calls"),
        (CALL + END, "", "", 1, "tool_calls"),
        (END, "", "", 0, "stop"),
    ],
)
def test_the_content_of_a_turn(
    api: str, streamed: bool, written: str, text: str, thoughts: str, calls: int, reason: str
) -> None:
    options = {"stream_options": {"include_usage": True}} if streamed and api == "chat" else {}
    response = talk(lambda client: create(client, api, streamed, tools=TOOLS[api], **options), lambda *_: written)
    reason = reason if api == "chat" else "completed"
    assert shown(response) == (text, thoughts, [("search", {"query": "ø"})] * calls, reason)
    sizes = [each for name, each in response.usage if name in ("completion_tokens", "output_tokens")]
    assert sizes == [len(tokenizer_of("qwen3").encode(written))]
    read = response.usage.prompt_tokens if api == "chat" else response.usage.input_tokens
    assert response.usage.total_tokens == read + sizes[0] and read > 20
    assert response.model == "m"


@pytest.mark.parametrize("call", ["", CALL])
def test_a_turn_that_was_cut_is_marked(call: str) -> None:
    """Even if a call was complete before."""

    def agent(client: OpenAI) -> Any:
        chunks = [*create_events(client.chat.completions, messages=HI, tools=TOOLS["chat"])]
        events = [*create_events(client.responses, input="hi", tools=TOOLS["responses"])]
        wholes = [shown(create(client, api, False, tools=TOOLS[api])) for api in TOOLS]
        return chunks[-1].choices[0].finish_reason, events[-1].type, wholes

    text, calls = "ha" * 256, [("search", {"query": "ø"})] if call else []
    limit = len(tokenizer_of("qwen3").encode(call + text))
    wholes = [(text, "", calls, reason) for reason in ("length", "incomplete max_output_tokens")]
    assert talk(agent, lambda *_: call + text + "ha", turn=limit) == ("length", "response.incomplete", wholes)


def nested(levels: int) -> str:
    return CALL.replace('"ø"', "[" * levels + "]" * levels)


@API
@STREAMED
@pytest.mark.parametrize("written", [f"{THINKS}I look.\n{CALL}\n{CALL}", *map(nested, (9, 100, 600, 900, 5000))])
def test_a_conversation_goes_on_with_what_the_api_returned(api: str, streamed: bool, written: str) -> None:
    """Even if calls nest so deeply that not all code could follow them."""

    def agent(client: OpenAI) -> None:
        history: list[Any] = [*HI]
        for _ in range(3):
            more: dict[str, Any] = {"messages" if api == "chat" else "input": history, "tools": TOOLS[api]}
            response = create(client, api, streamed, **more)
            if api == "chat":
                message = response.choices[0].message
                calls = message.tool_calls or ()
                results = [{"role": "tool", "tool_call_id": each.id, "content": "x"} for each in calls]
                history += [message, *(results or HI)]
            else:
                calls = [each for each in response.output if each.type == "function_call"]
                results = [{"type": "function_call_output", "call_id": c.call_id, "output": "x"} for c in calls]
                history += [*response.output, *(results or HI)]

    asked: list[list[int]] = []
    talk(agent, lambda row, ids: asked.append(ids) or written + END, turn=20_000)
    assert len(asked) == 3
    assert all(later[: len(before)] == before for before, later in pairwise(asked))


def test_items_are_messages() -> None:
    call = {"type": "function_call", "name": "search", "arguments": "{}"}
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "input_text", "text": text} for text in ("Be ", "kind.")]},
        *HI,
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I see."}]},
        {"type": "message", "role": "assistant", "content": "I look."},
        *({**call, "call_id": name} for name in "ab"),
        *({"type": "function_call_output", "call_id": name, "output": f"found {name}"} for name in "ab"),
        {"type": "reasoning", "summary": []},
        {**call, "call_id": "c"},
    ]
    messages = responses.read({"input": items}).messages
    calls = [[each["id"] for each in message.get("tool_calls", ())] for message in messages]
    shown = [(each["role"], each["content"], each.get("reasoning_content")) for each in messages]
    assert shown == [
        ("system", "Be kind.", None),
        ("user", "hi", None),
        ("assistant", "I look.", "I see."),
        ("tool", "found a", None),
        ("tool", "found b", None),
        ("assistant", "", None),
    ]
    assert calls == [[], [], ["a", "b"], [], [], ["c"]]


class City(BaseModel):
    name: str


@pytest.mark.parametrize("constrains", [False, True])
def test_structured_output(constrains: bool, caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine(lambda row, ids: '{"name": "Oslo"}' + END, qwen_tokenizer())
    engine.constrains = constrains

    def agent(client: OpenAI) -> Any:
        chat = client.chat.completions.parse(model="m", messages=HI, response_format=City)
        response = client.responses.parse(model="m", input="hi", text_format=City)
        create(client, "chat", False, response_format={"type": "json_object"})
        create(client, "responses", False, text={"format": {"type": "text"}})
        create(client, "chat", False, response_format={"type": "json_object"}, tools=TOOLS["chat"])
        return chat.choices[0].message.parsed, response.output_parsed

    assert talk(agent, None, engine=engine) == (City(name="Oslo"), City(name="Oslo"))
    properties = [each and [*each.get("properties", {})] for each in engine.schemas]
    assert properties == ([["name"], ["name"], [], None, None] if constrains else [None] * 5)
    assert "response_format" in caplog.text, "if it offers tools, which it could not call"


@API
def test_what_has_no_effect_is_logged_once(api: str, caplog: pytest.LogCaptureFixture) -> None:
    options: Any = {"temperature": 0, "tool_choice": "required", "parallel_tool_calls": False}
    unknown: Any = {"stop_token_ids": [5], "enable_thinking": False, "chat_template": "x", "guided_choice": ["a", "b"]}
    unknown |= {} if api == "chat" else {"text": {"verbosity": "low"}}
    harmless: Any = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "flex"}

    def agent(client: OpenAI) -> Any:
        more = {**options, **harmless, "extra_body": {**unknown, "n": 1, "best_of": None}}
        return [create(client, api, False, tools=TOOLS[api], **more) for _ in range(2)]

    assert len(talk(agent, f"Yes.{END}")) == 2
    found = [name.replace("text.verbosity", "text") for name in re.findall("An agent sets `(.*?)`", caplog.text)]
    assert sorted(found) == sorted({**options, **unknown})


def test_responses_go_on_from_earlier_ones() -> None:
    """By their id, or by those of their items, in one context and without repeating instructions."""

    def agent(client: OpenAI) -> Any:
        more = {"tools": TOOLS["responses"]}
        first = create(client, "responses", False, **more)
        (called,) = [each for each in first.output if each.type == "function_call"]
        found = {"type": "function_call_output", "call_id": called.call_id, "output": "found"}
        second = create(client, "responses", True, previous_response_id=first.id, input=[found], **more)
        assert second.previous_response_id == first.id
        history = [*HI, *({"type": "item_reference", "id": each.id} for each in first.output), found]
        history += [{"type": "item_reference", "id": each.id} for each in second.output]
        return create(client, "responses", False, input=[*history, *HI], **more)

    asked: list[list[int]] = []
    talk(agent, lambda row, ids: asked.append(ids) or f"I look.\n{CALL}{END}")
    assert len(asked) == 3
    assert all(later[: len(before)] == before for before, later in pairwise(asked))
    assert tokenizer_of("qwen3").decode(asked[-1]).count("Be kind.") == 1


def test_tools_of_other_kinds(caplog: pytest.LogCaptureFixture) -> None:
    """A namespace is flattened and shown in its calls; what a provider would run is left out."""
    space = {"type": "namespace", "name": "atlas", "description": "x", "tools": TOOLS["responses"]}
    offered = [space, {"type": "web_search"}, {"type": "mcp", "server_label": "x"}]

    def agent(client: OpenAI) -> Any:
        return [create(client, "responses", streamed, tools=offered).output[-1] for streamed in (False, True)]

    calls = talk(agent, CALL + END)
    assert [(each.name, each.namespace) for each in calls] == [("search", "atlas")] * 2
    assert caplog.text.count("An agent sets `tools`") == 1 and "web_search, mcp" in caplog.text


@STREAMED
def test_several_choices_are_turns_of_one_request(streamed: bool) -> None:
    turn = iter(range(9))

    def agent(example: Any, endpoint: Access) -> float:
        with OpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key) as client:
            reply = create(client, "chat", streamed, n=3, logprobs=True)
            said = [each.message.content for each in reply.choices]
            assert said == ["a0", "a1", "a2"]
            tokens = [each.token for each in reply.choices[1].logprobs.content]
            assert tokens == ["a", "1", END] and reply.choices[1].logprobs.content[0].logprob == -1.0
            history = [*HI, {"role": "assistant", "content": said[1]}, *HI]
            create(client, "chat", False, messages=history)
        return 1.0

    output, metrics, engine = collect(agent, script=lambda *_: f"a{next(turn)}{END}", trajectory=150, turn=150)
    assert output["agent_rewards"] == [{"reward": 1.0}]
    assert [each.text for each in output["trajectory"][0].turns] == [f"a{number}{END}" for number in range(4)]
    assert (metrics["endpoint/new_context"], metrics["endpoint/extended"]) == (2, 1)
    assert [row for row, _ in engine.asked] == [0, 1, 2, 1]


def test_limits_and_stop_strings_of_a_request() -> None:
    def agent(client: OpenAI) -> Any:
        cut = create(client, "chat", False, max_tokens=9, max_completion_tokens=3)
        stopped = create(client, "chat", False, stop=["ll", "H!"])
        assert [*(each.id for each in client.models.list()), client.models.retrieve("m").id] == ["policy", "m"]
        return shown(cut)[::3], shown(create(client, "responses", False, max_output_tokens=2))[0], shown(stopped)[::3]

    assert talk(agent, "Hello.") == (("Hel", "length"), "He", ("He", "stop"))


CHAT, RESPONSES = "chat/completions", "responses"
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((CHAT, {"n": number}, "n") for number in (0, 129, "2", True)),
    (RESPONSES, {"n": 2}, "n"),
    (CHAT, {"previous_response_id": "resp_1"}, "previous_response_id"),
    (CHAT, {"logit_bias": {"1": 1}}, "logit_bias"),
    (CHAT, {"functions": [{}]}, "functions"),
    (CHAT, {"continue_final_message": True}, "continue_final_message"),
    *((CHAT, {"max_tokens": limit}, "max_tokens") for limit in (0, -1, "9", 1.5)),
    *((CHAT, {"stop": stop}, "stop") for stop in ("a", [""], [1], 5, {"a": 1})[1:]),
    (CHAT, {"tools": [{"type": "custom", "name": "patch"}]}, "tools"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
    (CHAT, {"messages": [*HI, {"role": "user", "content": [IMAGE]}]}, "messages[1].content"),
    (CHAT, {"messages": [*HI, {"role": "assistant", "tool_calls": [{"type": "custom"}]}]}, "messages[1].tool_calls"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}}, "response_format"),
    (CHAT, {"response_format": "json"}, "response_format"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": "x"}}, "response_format"),
    *(
        (CHAT, {"tools": tools}, "tools")
        for tools in (5, [{"type": "function", "function": "x"}], [{"type": "function"}])
    ),
    (CHAT, {"stream": True, "stream_options": "x"}, "stream_options"),
    (CHAT, {"messages": [*HI, {"role": "assistant", "tool_calls": 5}]}, "messages[1].tool_calls"),
    (CHAT, {"web_search_options": {}}, "web_search_options"),
    (CHAT, {"modalities": ["audio"]}, "modalities"),
    (CHAT, {"max_tokens": True}, "max_tokens"),
    (RESPONSES, {"text": "x"}, "text"),
    (RESPONSES, {"text": {"format": "x"}}, "text.format"),
    (RESPONSES, {"input": [{"type": "function_call", "call_id": "a"}]}, "input[0]"),
    (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
    (RESPONSES, {"prompt": {"id": "pmpt_1"}}, "prompt"),
    (RESPONSES, {"background": True}, "background"),
    (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
    (RESPONSES, {"tools": [{"type": "computer"}]}, "tools"),
    (RESPONSES, {"input": [], "instructions": None}, "input"),
    (RESPONSES, {"input": [*HI, {"role": "robot", "content": "x"}]}, "input[1].role"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": "x"}}}, "text.format"),
]


def test_what_is_not_served_is_refused_by_name() -> None:
    with without_a_rollout() as access, httpx2.Client(base_url=access.base_url) as client:
        client.headers["Authorization"] = f"Bearer {access.api_key}"
        answers = [
            client.post(path, json={**BODIES["chat" if path == CHAT else "responses"], **body})
            for path, body, _ in REFUSED
        ]
        answers += [client.post(CHAT, content=b"{"), client.post(CHAT, json=[])]
        answers += [client.post("embeddings", json={}), client.get(CHAT)]
    assert [each.status_code for each in answers] == [400] * (len(REFUSED) + 2) + [404] * 2
    errors = [each.json()["error"] for each in answers]
    assert [error["param"] for error in errors[:-4]] == [field for *_, field in REFUSED]
    assert {each.headers["x-should-retry"] for each in answers} == {"false"}
    assert all(field in error["message"] for error, (*_, field) in zip(errors, REFUSED, strict=False))


def test_a_key_is_for_one_trajectory_as_long_as_its_agent_runs() -> None:
    keys: list[Access] = []

    def agent(example: Any, endpoint: Access) -> None:
        keys.append(endpoint)
        for scheme in ("Bearer", "bearer"):
            headers = {"Authorization": f"{scheme} {endpoint.api_key}"}
            assert httpx2.get(f"{endpoint.base_url}/models", headers=headers).status_code == 200

    collect(EndpointRollout(agent), 2)
    assert len({each.api_key for each in keys}) == 2
    for key, error in ((keys[0].api_key, PermissionDeniedError), ("sk-1", AuthenticationError)):
        with OpenAI(base_url=keys[0].base_url, api_key=key) as client, pytest.raises(error):
            create(client, "chat", False)
