"""The Responses API, as far as agents need it: items in, items out. Nothing is stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from sorl_trl.endpoint.requests import (
    BadRequest,
    Body,
    Message,
    Request,
    Served,
    arguments_of,
    event,
    read_message,
    read_object,
    read_request,
    read_schema,
    read_text,
    tool_call,
)

FIELDS = {"input", "instructions", "text", "text.format"}
"""The fields that have an effect in this API alone."""


def read(body: Body) -> Request:
    """Parse a request. Raises BadRequest, which names the field, for anything unsupported or malformed."""
    form = read_object(read_object(body.get("text"), "text").get("format"), "text.format")
    schema = read_schema(form, form.get("schema"), "text.format")
    return read_request(body, _messages(body), lambda tool: tool, schema)


def _messages(body: Body) -> list[Message]:
    given = body.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not all(isinstance(each, dict) for each in items):
        raise BadRequest("`input` must be text or a list of items", "input")
    messages: list[Message] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": read_text(body["instructions"], "instructions")})
    thoughts = ""
    for number, item in enumerate(items):
        field, kind = f"input[{number}]", item.get("type") or "message"
        if kind == "reasoning":
            thoughts = read_text(item.get("summary") or item.get("content"), field)
        elif kind == "function_call_output":
            output = read_text(item.get("output"), field)
            messages.append({"role": "tool", "content": output, "tool_call_id": str(item.get("call_id"))})
        elif kind == "function_call":
            if not isinstance(item.get("name"), str):
                raise BadRequest(f"`{field}` is {item!r:.200}, but a call must have a `name`", field)
            call = tool_call(item.get("call_id"), item["name"], item.get("arguments"))
            _own_message(messages, thoughts).setdefault("tool_calls", []).append(call)
            thoughts = ""
        elif kind == "message":
            message = read_message(item, field)
            if message["role"] == "assistant":
                messages.append({**message, **({"reasoning_content": thoughts} if thoughts else {})})
                thoughts = ""
            else:
                messages.append(message)
        else:
            raise BadRequest(f"`{field}` is of type {kind!r}, which is not supported", field, "unsupported")
    if not messages:
        raise BadRequest("`input` is empty, but must hold at least one item", "input")
    return messages


def _own_message(messages: list[Message], thoughts: str) -> Message:
    """The policy's message that a call belongs to: the last one, or a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    if thoughts:
        messages[-1]["reasoning_content"] = thoughts
    return messages[-1]


def whole(served: Served, output: Sequence[Any] | None = None) -> dict[str, Any]:
    """A response, or with an empty `output`, one that has only begun."""
    is_cut, body = served.finish_reason == "length", served.body
    read, written = served.prompt_tokens, served.completion_tokens
    usage = {
        "input_tokens": read,
        "output_tokens": written,
        "total_tokens": read + written,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    status = "in_progress" if output is not None else "incomplete" if is_cut else "completed"
    return {
        "id": f"resp_{served.response_id}",
        "object": "response",
        "created_at": served.created,
        "model": served.model,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "output": _items(served) if output is None else output,
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "temperature": None,
        "top_p": None,
        "text": body.get("text") or {"format": {"type": "text"}},
        "usage": usage if output is None else None,
    }


def _items(served: Served) -> list[dict[str, Any]]:
    answered, name = served.message, served.response_id
    calls = answered.get("tool_calls") or ()
    items: list[dict[str, Any]] = []
    if thoughts := answered.get("reasoning_content"):
        summary = [{"type": "summary_text", "text": thoughts}]
        items.append({"type": "reasoning", "id": f"rs_{name}", "summary": summary})
    if answered["content"] or not calls:
        text = {"type": "output_text", "text": answered["content"], "annotations": []}
        items.append(
            {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": "completed", "content": [text]}
        )
    for call in calls:
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{call['id']}",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": arguments_of(call),
                "status": "completed",
            }
        )
    return items


def stream(served: Served) -> Iterator[bytes]:
    """The events of a streamed response. The turn is already sampled, so each item comes in one piece."""
    numbers = count()

    def told(kind: str, **data: Any) -> bytes:
        return event({"type": kind, "sequence_number": next(numbers), **data}, kind)

    yield told("response.created", response=whole(served, []))
    for index, item in enumerate(_items(served)):
        yield told("response.output_item.added", output_index=index, item=_begun(item))
        for kind, data in _parts(item):
            yield told(kind, output_index=index, item_id=item["id"], **data)
        yield told("response.output_item.done", output_index=index, item=item)
    final = whole(served)
    yield told(f"response.{final['status']}", response=final)


def _begun(item: Mapping[str, Any]) -> dict[str, Any]:
    """An item before its parts have arrived."""
    if item["type"] == "reasoning":
        return {**item, "summary": []}
    empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
    return {**item, "status": "in_progress", **empty}


def _parts(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    if item["type"] == "message":
        (part,) = item["content"]
        text, place = part["text"], {"content_index": 0}
        yield "response.content_part.added", {**place, "part": {**part, "text": ""}}
        yield "response.output_text.delta", {**place, "delta": text, "logprobs": []}
        yield "response.output_text.done", {**place, "text": text, "logprobs": []}
        yield "response.content_part.done", {**place, "part": part}
    elif item["type"] == "function_call":
        arguments = item["arguments"]
        yield "response.function_call_arguments.delta", {"delta": arguments}
        yield "response.function_call_arguments.done", {"arguments": arguments, "name": item["name"]}
