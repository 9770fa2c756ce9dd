"""Chat Completions: parses requests into a `Request`, and formats answers as JSON, whole or streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from sorl_trl.endpoint.contexts import Answer
from sorl_trl.endpoint.messages import BadRequest, Request, read_messages, read_object, read_tools
from sorl_trl.text import nests

Body = Mapping[str, Any]
"""The JSON of a request."""

IGNORED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "top_logprobs"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("reasoning_effort", "reasoning", "chat_template_kwargs"),
)
"""Client settings for sampling and templates that are ignored: the trainer decides both."""
HARMLESS = {
    *("user", "safety_identifier", "metadata", "store", "include", "service_tier", "priority", "request_id"),
    *("prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_salt"),
}
"""Fields that do not change what is sampled."""
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "logprobs": (None, False),
    "logit_bias": (None, {}),
    "audio": (None,),
    "functions": (None, []),
    "function_call": (None,),
    "previous_response_id": (None,),
    "conversation": (None,),
    "prompt": (None,),
    "background": (None, False),
    "web_search_options": (None,),
    "modalities": (None, [], ["text"]),
    "continue_final_message": (None, False),
}
"""Unsupported fields, and the values at which they request nothing."""
_LEVELS = 128
"""How deep a request may nest, so that whatever walks over it reaches its end: twice as deep as calls. Our choice."""
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
COMMON = {"model", "tools", "tool_choice", "parallel_tool_calls", "stream", *_LIMITS}
FIELDS = COMMON | {"messages", "stop", "response_format", "stream_options"}
"""The fields that have an effect, in both APIs and in this one."""


@dataclass(frozen=True)
class Served:
    """An answer, with everything that a response's JSON contains."""

    body: Body
    answer: Answer
    prompt_tokens: int
    response_id: str
    """The same if a request is sent again."""
    created: int
    """In seconds since 1970."""

    @property
    def model(self) -> str:
        return model_of(self.body)

    @property
    def completion_tokens(self) -> int:
        return len(self.answer.turn.token_ids)


def read_body(body: bytes) -> Body:
    """The JSON of a request. Raises BadRequest if it is no object, or nests too deeply."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        asked = None
    if not isinstance(asked, dict):
        raise BadRequest("the body is not a JSON object")
    if nests(asked, _LEVELS):
        raise BadRequest(f"the body nests in more than {_LEVELS} levels")
    return asked


def model_of(body: Body) -> str:
    """The agent's name."""
    return str(body.get("model") or "policy")


def check_fields(body: Body) -> None:
    """Raise BadRequest for an unsupported field."""
    for name, nothing in REFUSED.items():
        if body.get(name) not in nothing:
            allowed = " or ".join(repr(each) for each in nothing if each is not None) or "left out"
            raise BadRequest(f"`{name}` is {body[name]!r:.200}, but must be {allowed}", name, "unsupported")


def without_effect(body: Body, fields: Set[str], lacks_schema: bool) -> dict[str, str]:
    """Why fields of a request have no effect, by name; `fields` are those that have one in its API."""
    parts = {f"text.{name}": part for name, part in (body.get("text") or {}).items()} if "text" in fields else {}
    given = {**body, **parts}
    found = {
        name: "the trainer's config decides" if name in IGNORED else "the endpoint does not support it"
        for name in given.keys() - fields - HARMLESS - REFUSED.keys()
        if given[name] not in (None, [], {})
    }
    if lacks_schema:
        found["response_format"] = "only vLLM constrains turns to a schema, and only turns that cannot call tools"
    if body.get("tool_choice") not in (None, "auto", "none"):
        found["tool_choice"] = "the policy cannot be forced to call a tool"
    if body.get("parallel_tool_calls") is False:
        found["parallel_tool_calls"] = "the policy cannot be kept from making several calls at once"
    return found


def read_limit(body: Body) -> int | None:
    """The smallest limit under any of its names. Raises BadRequest if one is not a positive number."""
    given = {name: body[name] for name in _LIMITS if body.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise BadRequest(f"`{name}` is {value!r}, but must be at least 1", name)
    return min(given.values(), default=None)


def read(body: Body) -> Request:
    """Parse a request. Raises BadRequest, which names the field, for anything unsupported or malformed."""
    check_fields(body)
    form, stops = read_object(body.get("response_format"), "response_format"), body.get("stop") or ()
    read_object(body.get("stream_options"), "stream_options")
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, Sequence) or not all(isinstance(each, str) and each for each in stops):
        raise BadRequest(
            f"`stop` is {body['stop']!r:.200}, but must be a string or a list of strings that are not empty", "stop"
        )
    described = read_object(form.get("json_schema"), "response_format")
    return Request(
        model=model_of(body),
        messages=read_messages(body.get("messages")),
        tools=read_tools(body.get("tools"), lambda tool: tool.get("function")),
        limit=read_limit(body),
        stops=tuple(stops),
        schema=read_schema(form, described.get("schema"), "response_format"),
        may_call=body.get("tool_choice") != "none",
    )


def read_schema(form: Mapping[str, Any], given: Any, field: str) -> Mapping[str, Any] | None:
    """The JSON schema of an answer in some form; for "json_schema", the `given` one."""
    if form.get("type") == "json_object":
        return {"type": "object"}
    if form.get("type") != "json_schema":
        return None
    if not isinstance(given, dict):
        raise BadRequest(f"`{field}` has the schema {given!r:.200}, but must have an object", field)
    return given


def whole(served: Served) -> dict[str, Any]:
    """A response."""
    choice = {
        "index": 0,
        "message": _message(served.answer),
        "finish_reason": served.answer.finish_reason,
        "logprobs": None,
    }
    return {**_head(served, "chat.completion"), "choices": [choice], "usage": _usage(served)}


def stream(served: Served) -> Iterator[bytes]:
    """The events of a streamed response. The turn is already sampled, so a few events contain all of it."""
    head, message = _head(served, "chat.completion.chunk"), _message(served.answer)

    def chunk(delta: Mapping[str, Any], reason: str | None = None) -> bytes:
        return event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}]})

    yield chunk({"role": "assistant", "content": None if message["content"] is None else ""})
    for name in ("reasoning_content", "content"):
        if message.get(name):
            yield chunk({name: message[name]})
    for number, call in enumerate(message.get("tool_calls") or ()):
        yield chunk({"tool_calls": [{"index": number, **call}]})
    yield chunk({}, served.answer.finish_reason)
    if (served.body.get("stream_options") or {}).get("include_usage"):
        yield event({**head, "choices": [], "usage": _usage(served)})
    yield b"data: [DONE]\n\n"


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


def arguments_of(call: Mapping[str, Any]) -> str:
    """The arguments of a call in the API's form: as JSON, or as the text that the policy wrote instead."""
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _head(served: Served, kind: str) -> dict[str, Any]:
    response_id = f"chatcmpl-{served.response_id}"
    return {"id": response_id, "object": kind, "created": served.created, "model": served.model}


def _message(answer: Answer) -> dict[str, Any]:
    answered = answer.message
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["function"]["name"], "arguments": arguments_of(call)},
        }
        for call in answered.get("tool_calls") or ()
    ]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": answered["content"] or (None if calls else ""),
        "refusal": None,
    }
    if answered.get("reasoning_content"):
        message["reasoning_content"] = answered["reasoning_content"]
    return message | ({"tool_calls": calls} if calls else {})


def _usage(served: Served) -> dict[str, int]:
    read, written = served.prompt_tokens, served.completion_tokens
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
