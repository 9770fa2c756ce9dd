"""Chat Completions: reads requests, and writes answers as JSON, whole or streamed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sorl_trl.endpoint.requests import (
    BadRequest,
    Body,
    Request,
    Served,
    arguments_of,
    event,
    read_message,
    read_object,
    read_request,
    read_schema,
)

FIELDS = {"messages", "stop", "response_format", "stream_options"}
"""The fields that have an effect in this API alone."""


def read(body: Body) -> Request:
    """Parse a request. Raises BadRequest, which names the field, for anything unsupported or malformed."""
    form, stops = read_object(body.get("response_format"), "response_format"), body.get("stop") or ()
    read_object(body.get("stream_options"), "stream_options")
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, Sequence) or not all(isinstance(each, str) and each for each in stops):
        raise BadRequest(
            f"`stop` is {body['stop']!r:.200}, but must be a string or a list of strings that are not empty", "stop"
        )
    given = body.get("messages")
    if not isinstance(given, list) or not given or not all(isinstance(each, dict) for each in given):
        raise BadRequest("`messages` must be a list with at least one message", "messages")
    messages = [read_message(each, f"messages[{number}]") for number, each in enumerate(given)]
    described = read_object(form.get("json_schema"), "response_format")
    schema = read_schema(form, described.get("schema"), "response_format")
    return read_request(body, messages, lambda tool: tool.get("function"), schema, stops)


def whole(served: Served) -> dict[str, Any]:
    """A response."""
    choice = {"index": 0, "message": _message(served), "finish_reason": served.finish_reason, "logprobs": None}
    return {**_head(served, "chat.completion"), "choices": [choice], "usage": _usage(served)}


def stream(served: Served) -> Iterator[bytes]:
    """The events of a streamed response. The turn is already sampled, so a few events contain all of it."""
    head, message = _head(served, "chat.completion.chunk"), _message(served)

    def chunk(delta: Mapping[str, Any], reason: str | None = None) -> bytes:
        return event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}]})

    yield chunk({"role": "assistant", "content": None if message["content"] is None else ""})
    for name in ("reasoning_content", "content"):
        if message.get(name):
            yield chunk({name: message[name]})
    for number, call in enumerate(message.get("tool_calls") or ()):
        yield chunk({"tool_calls": [{"index": number, **call}]})
    yield chunk({}, served.finish_reason)
    if (served.body.get("stream_options") or {}).get("include_usage"):
        yield event({**head, "choices": [], "usage": _usage(served)})
    yield b"data: [DONE]\n\n"


def _head(served: Served, kind: str) -> dict[str, Any]:
    response_id = f"chatcmpl-{served.response_id}"
    return {"id": response_id, "object": kind, "created": served.created, "model": served.model}


def _message(served: Served) -> dict[str, Any]:
    answered = served.message
    calls = [
        {**call, "function": {"name": call["function"]["name"], "arguments": arguments_of(call)}}
        for call in answered.get("tool_calls") or ()
    ]
    content = answered["content"] or (None if calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if answered.get("reasoning_content"):
        message["reasoning_content"] = answered["reasoning_content"]
    return message | ({"tool_calls": calls} if calls else {})


def _usage(served: Served) -> dict[str, int]:
    read, written = served.prompt_tokens, served.completion_tokens
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
