"""Chat Completions: reads requests, and writes answers as JSON, whole or streamed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sorl_trl.endpoint.contexts import Answer
from sorl_trl.endpoint.requests import (
    BadRequest,
    Body,
    Request,
    arguments_of,
    event,
    is_count,
    model_of,
    read_message,
    read_object,
    read_request,
    read_schema,
    read_stops,
)

FIELDS = {"messages", "stop", "response_format", "stream_options", "n", "logprobs"}
"""The fields that have an effect in this API alone."""
_MOST_CHOICES = 128
"""As for OpenAI."""
_CHUNK = {"finish_reason": None, "logprobs": None}
_KINDS = {401: "authentication_error", 403: "permission_error", 500: "server_error"}


def read(body: Body, earlier: Sequence[Any] = ()) -> Request:
    """Parse a request. Raises BadRequest, which names the field, for anything unsupported or malformed."""
    form = read_object(body.get("response_format"), "response_format")
    read_object(body.get("stream_options"), "stream_options")
    if not is_count(1 if body.get("n") is None else body["n"], _MOST_CHOICES):
        raise BadRequest(f"`n` is {body['n']!r:.200}, but must be between 1 and {_MOST_CHOICES}", "n")
    given = body.get("messages")
    if not isinstance(given, list) or not given or not all(isinstance(each, dict) for each in given):
        raise BadRequest("`messages` must be a list with at least one message", "messages")
    messages = [read_message(each, f"messages[{number}]") for number, each in enumerate(given)]
    described = read_object(form.get("json_schema"), "response_format")
    schema = read_schema(form, described.get("schema"), "response_format")
    return read_request(body, messages, _function, FIELDS, schema, read_stops(body.get("stop"), "stop"))


def _function(tool: Mapping[str, Any]) -> Any:
    return tool.get("function", {}) if tool.get("type") == "function" else None


def choices(body: Body) -> int:
    """How many answers a request wants, if it is well formed."""
    return body["n"] if is_count(body.get("n"), _MOST_CHOICES) else 1


def whole(body: Body, *answers: Answer) -> dict[str, Any]:
    """A response, with a choice for each answer."""
    choices = [
        {
            "index": number,
            "message": _message(each),
            "finish_reason": each.finish_reason,
            "logprobs": each.logprobs and {"content": each.logprobs, "refusal": None},
        }
        for number, each in enumerate(answers)
    ]
    return {**_head(body, answers[0], "chat.completion"), "choices": choices, "usage": _usage(answers)}


def stream(body: Body, *answers: Answer) -> Iterator[bytes]:
    """The events of a streamed response. The turns are already sampled, so a few events contain all of it."""
    head = _head(body, answers[0], "chat.completion.chunk")
    for choice in whole(body, *answers)["choices"]:
        for delta in _deltas(choice["message"]):
            yield event({**head, "choices": [{**_CHUNK, "index": choice["index"], "delta": delta}]})
        del choice["message"]
        yield event({**head, "choices": [{**choice, "delta": {}}]})
    if (body.get("stream_options") or {}).get("include_usage"):
        yield event({**head, "choices": [], "usage": _usage(answers)})
    yield b"data: [DONE]\n\n"


def _deltas(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": None if message["content"] is None else ""}
    for name in ("reasoning_content", "content"):
        if message.get(name):
            yield {name: message[name]}
    for number, call in enumerate(message.get("tool_calls") or ()):
        yield {"tool_calls": [{"index": number, **call}]}


def error(status: int, message: str, code: str | None = None, field: str | None = None) -> dict[str, Any]:
    """The body of an error response, for Responses as well."""
    kind = _KINDS.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def _head(body: Body, answer: Answer, kind: str) -> dict[str, Any]:
    response_id = f"chatcmpl-{answer.answer_id}"
    return {"id": response_id, "object": kind, "created": answer.created, "model": model_of(body)}


def _message(answer: Answer) -> dict[str, Any]:
    answered = answer.message
    calls = [
        {**call, "function": {"name": call["function"]["name"], "arguments": arguments_of(call)}}
        for call in answered.get("tool_calls") or ()
    ]
    content = answered["content"] or (None if calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if answered.get("reasoning_content"):
        message["reasoning_content"] = answered["reasoning_content"]
    return message | ({"tool_calls": calls} if calls else {})


def _usage(answers: Sequence[Answer]) -> dict[str, int]:
    read, written = answers[0].prompt_tokens, sum(len(each.turn.token_ids) for each in answers)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
