"""Anthropic's Messages API: reads requests, and writes answers as JSON, whole or streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sorl_trl.endpoint.contexts import Answer
from sorl_trl.endpoint.requests import (
    BadRequest,
    Body,
    Message,
    Request,
    event,
    model_of,
    read_list,
    read_message,
    read_object,
    read_request,
    read_schema,
    read_stops,
    read_text,
    tool_call,
)

FIELDS = {"messages", "system", "stop_sequences", "output_config"}
"""The fields that have an effect in this API alone."""
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
}
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_CHOICES = {"any": "required", "auto": "auto", "none": "none", None: None}
_BILLING = "x-anthropic-billing-header:"
"""How a block begins that Claude Code writes anew for each request, and that no policy should read."""
_TEXT = "__text__"
"""The only argument of a call whose arguments the policy did not write as an object, which this API demands."""


def read(body: Body, earlier: Sequence[Any] = ()) -> Request:
    """Parse a request. Raises BadRequest, which names the field, for anything unsupported or malformed."""
    choice = read_object(body.get("tool_choice"), "tool_choice")
    form = read_object(read_object(body.get("output_config"), "output_config").get("format"), "output_config.format")
    named = {"type": "function", "name": choice.get("name")}
    shared = {
        **body,
        "tool_choice": named if choice.get("type") == "tool" else _CHOICES.get(choice.get("type"), choice),
        "parallel_tool_calls": not choice.get("disable_parallel_tool_use"),
    }
    messages = [*_system(body.get("system")), *_messages(body.get("messages"))]
    schema = read_schema(form, form.get("schema"), "output_config.format")
    stops = read_stops(body.get("stop_sequences"), "stop_sequences")
    return read_request(shared, messages, _function, FIELDS, schema, stops)


def _function(tool: Mapping[str, Any]) -> Any:
    return {**tool, "parameters": tool.get("input_schema")} if tool.get("type") in (None, "custom") else None


def _system(given: Any) -> list[Message]:
    blocks = [given] if isinstance(given, str) else read_list(given, "system")
    texts = [read_text([each], "system") for each in blocks]
    text = "\n\n".join(each for each in texts if not each.startswith(_BILLING))
    return [{"role": "system", "content": text}] if text else []


def _messages(given: Any) -> list[Message]:
    if not isinstance(given, list) or not given or not all(isinstance(each, dict) for each in given):
        raise BadRequest("`messages` must be a list with at least one message", "messages")
    if given[-1].get("role") == "assistant":
        raise BadRequest("`messages` ends with the assistant's, but the policy continues no message", "messages")
    messages: list[Message] = []
    for number, each in enumerate(given):
        content, field = each.get("content"), f"messages[{number}]"
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise BadRequest(f"`{field}.content` is {content!r:.200}, but must be text or a list of blocks", field)
        read = _own if each.get("role") == "assistant" else _given
        messages += read(each, blocks, field)
    return messages


def _given(message: Mapping[str, Any], blocks: Sequence[Mapping[str, Any]], field: str) -> Iterator[Message]:
    """The results and the text of a user's message."""
    texts = []
    for block in blocks:
        if block.get("type") == "tool_result":
            output = read_text(block.get("content"), f"{field}.content")
            yield {"role": "tool", "content": output, "tool_call_id": str(block.get("tool_use_id"))}
        else:
            texts.append(read_text([block], f"{field}.content"))
    if texts or not blocks:
        yield read_message({"role": message.get("role"), "content": "\n\n".join(texts)}, field)


def _own(message: Mapping[str, Any], blocks: Sequence[Mapping[str, Any]], field: str) -> Iterator[Message]:
    """The policy's message."""
    texts, thoughts, calls = list[str](), list[str](), list[Message]()
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            if not isinstance(block.get("name"), str):
                raise BadRequest(f"`{field}` has {block!r:.200}, but a call must have a `name`", field)
            given = read_object(block.get("input"), f"{field}.content")
            calls.append(tool_call(block.get("id"), block["name"], given[_TEXT] if [*given] == [_TEXT] else given))
        elif kind == "thinking":
            thoughts.append(read_text(block.get("thinking"), f"{field}.content"))
        elif kind != "redacted_thinking":
            texts.append(read_text([block], f"{field}.content"))
    own: Message = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        own["reasoning_content"] = "\n".join(thoughts)
    yield own | ({"tool_calls": calls} if calls else {})


def whole(body: Body, answer: Answer) -> dict[str, Any]:
    """A response."""
    return {
        "id": f"msg_{answer.answer_id}",
        "type": "message",
        "role": "assistant",
        "model": model_of(body),
        "content": [*_blocks(answer)],
        **_end(answer),
        "usage": {"input_tokens": answer.prompt_tokens, **_written(answer)},
    }


def _end(answer: Answer) -> dict[str, Any]:
    reason = _REASONS[answer.finish_reason] if answer.stop is None else "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stop}


def _written(answer: Answer) -> dict[str, int]:
    return {"output_tokens": len(answer.turn.token_ids)}


def _blocks(answer: Answer) -> Iterator[dict[str, Any]]:
    message = answer.message
    calls = message.get("tool_calls") or ()
    if thoughts := message.get("reasoning_content"):
        # Some clients turn thoughts without a signature into text.
        yield {"type": "thinking", "thinking": thoughts, "signature": answer.answer_id}
    if message["content"] or not calls:
        yield {"type": "text", "text": message["content"]}
    for call in calls:
        given = call["function"]["arguments"]
        arguments = given if isinstance(given, Mapping) else {_TEXT: given}
        yield {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments}


def stream(body: Body, answer: Answer) -> Iterator[bytes]:
    """The events of a streamed response. The turn is already sampled, so each block comes in one piece."""

    def told(kind: str, **data: Any) -> bytes:
        return event({"type": kind, **data}, kind)

    begun = {**whole(body, answer), "content": [], "stop_reason": None, "stop_sequence": None}
    begun["usage"] = {**begun["usage"], "output_tokens": 0}
    yield told("message_start", message=begun)
    yield told("ping")
    for index, block in enumerate(_blocks(answer)):
        empty, deltas = _parts(block)
        yield told("content_block_start", index=index, content_block={**block, **empty})
        for delta in deltas:
            yield told("content_block_delta", index=index, delta=delta)
        yield told("content_block_stop", index=index)
    yield told("message_delta", delta=_end(answer), usage=_written(answer))
    yield told("message_stop")


def _parts(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What a block is before its parts have arrived, and these."""
    if block["type"] == "text":
        return {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "tool_use":
        return {"input": {}}, [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
    thoughts, signature = block["thinking"], block["signature"]
    return {"thinking": "", "signature": ""}, [
        {"type": "thinking_delta", "thinking": thoughts},
        {"type": "signature_delta", "signature": signature},
    ]


def error(status: int, message: str, code: str | None = None, field: str | None = None) -> dict[str, Any]:
    """The body of an error response."""
    # Claude Code and others recognize a full context by these words, and then compact their history.
    text = f"prompt is too long: {message}" if code == "context_length_exceeded" else message
    return {"type": "error", "error": {"type": _KINDS.get(status, "invalid_request_error"), "message": text}}
