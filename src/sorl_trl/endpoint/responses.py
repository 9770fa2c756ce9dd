"""The Responses API, as far as agents need it: items in, items out. Its state is the trajectory's own answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count
from typing import Any

from sorl_trl.endpoint.completions import error
from sorl_trl.endpoint.contexts import Answer
from sorl_trl.endpoint.conversation import Call
from sorl_trl.endpoint.requests import (
    BadRequest,
    Body,
    Message,
    Request,
    arguments_of,
    event,
    model_of,
    read_message,
    read_object,
    read_request,
    read_schema,
    read_text,
    tool_call,
)

__all__ = ["error", "read", "stream", "whole"]
FIELDS = {"input", "instructions", "text", "text.format", "previous_response_id"}
"""The fields that have an effect in this API alone."""


def read(body: Body, earlier: Sequence[Call] = ()) -> Request:
    """Parse a request, which may refer to `earlier` calls.

    Raises BadRequest, which names the field, for anything unsupported or malformed.
    """
    form = read_object(read_object(body.get("text"), "text").get("format"), "text.format")
    schema = read_schema(form, form.get("schema"), "text.format")
    instructions = read_text(body.get("instructions"), "instructions")
    own = [{"role": "system", "content": instructions}] if instructions else []
    messages = [*own, *_continued(body.get("previous_response_id"), earlier), *_messages(body.get("input"), earlier)]
    if not messages:
        raise BadRequest("`input` is empty, but must hold at least one item", "input")
    return replace(read_request(body, messages, _function, FIELDS, schema), own=len(own))


def _function(tool: Mapping[str, Any]) -> Any:
    return tool if tool.get("type") == "function" else None


def _continued(response_id: Any, earlier: Sequence[Call]) -> list[Message]:
    """The messages of an earlier call and its answer, without its instructions."""
    if response_id is None:
        return []
    for call in earlier:
        if call.answer is not None and _id(call.answer) == response_id:
            return [*call.request.messages[call.request.own :], call.answer.message]
    raise _unknown(response_id, "previous_response_id")


def _unknown(given: Any, field: str) -> BadRequest:
    return BadRequest(
        f"`{field}` is {given!r:.200}, which is no answer of this trajectory: with `store: false`, clients send the "
        "whole history instead",
        field,
        "unsupported",
    )


def _messages(given: Any, earlier: Sequence[Call]) -> list[Message]:
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not all(isinstance(each, dict) for each in items):
        raise BadRequest("`input` must be text or a list of items", "input")
    messages: list[Message] = []
    thoughts = ""
    for number, item in enumerate(items):
        field = f"input[{number}]"
        if item.get("type") == "item_reference":
            item = _referred(item.get("id"), earlier, field)
        kind = item.get("type") or "message"
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
    return messages


def _referred(item_id: Any, earlier: Sequence[Call], field: str) -> Mapping[str, Any]:
    """The item of an earlier answer."""
    items = chain.from_iterable(_items({}, call.answer) for call in earlier if call.answer is not None)
    found = next((each for each in items if each["id"] == item_id), None)
    if found is None:
        raise _unknown(item_id, field)
    return found


def _own_message(messages: list[Message], thoughts: str) -> Message:
    """The policy's message that a call belongs to: the last one, or a new one."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    if thoughts:
        messages[-1]["reasoning_content"] = thoughts
    return messages[-1]


def whole(body: Body, answer: Answer, output: Sequence[Any] | None = None) -> dict[str, Any]:
    """A response, or with an empty `output`, one that has only begun."""
    is_cut = answer.finish_reason == "length"
    read, written = answer.prompt_tokens, len(answer.turn.token_ids)
    usage = {
        "input_tokens": read,
        "output_tokens": written,
        "total_tokens": read + written,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }
    status = "in_progress" if output is not None else "incomplete" if is_cut else "completed"
    return {
        "id": _id(answer),
        "object": "response",
        "created_at": answer.created,
        "model": model_of(body),
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "previous_response_id": body.get("previous_response_id"),
        "output": _items(body, answer) if output is None else output,
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "temperature": None,
        "top_p": None,
        "text": body.get("text") or {"format": {"type": "text"}},
        "usage": usage if output is None else None,
    }


def _id(answer: Answer) -> str:
    return f"resp_{answer.answer_id}"


def _items(body: Body, answer: Answer) -> list[dict[str, Any]]:
    answered, name, spaces = answer.message, answer.answer_id, _namespaces(body)
    calls = answered.get("tool_calls") or ()
    items: list[dict[str, Any]] = []
    if thoughts := answered.get("reasoning_content"):
        summary = [{"type": "summary_text", "text": thoughts}]
        items.append({"type": "reasoning", "id": f"rs_{name}", "summary": summary})
    if answered["content"] or not calls:
        text = {
            "type": "output_text",
            "text": answered["content"],
            "annotations": [],
            "logprobs": answer.logprobs or [],
        }
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
                **spaces.get(call["function"]["name"], {}),
            }
        )
    return items


def _namespaces(body: Body) -> dict[str, dict[str, Any]]:
    """What the calls of functions that came in a namespace show of it, by name."""
    spaces = [each for each in body.get("tools") or () if each.get("type") == "namespace"]
    return {
        tool.get("name"): {"namespace": space.get("name")} for space in spaces for tool in space.get("tools") or ()
    }


def stream(body: Body, answer: Answer) -> Iterator[bytes]:
    """The events of a streamed response. The turn is already sampled, so each item comes in one piece."""
    numbers = count()

    def told(kind: str, **data: Any) -> bytes:
        return event({"type": kind, "sequence_number": next(numbers), **data}, kind)

    yield told("response.created", response=whole(body, answer, []))
    for index, item in enumerate(_items(body, answer)):
        yield told("response.output_item.added", output_index=index, item=_begun(item))
        for kind, data in _parts(item):
            yield told(kind, output_index=index, item_id=item["id"], **data)
        yield told("response.output_item.done", output_index=index, item=item)
    final = whole(body, answer)
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
        yield "response.output_text.delta", {**place, "delta": text, "logprobs": part["logprobs"]}
        yield "response.output_text.done", {**place, "text": text, "logprobs": part["logprobs"]}
        yield "response.content_part.done", {**place, "part": part}
    elif item["type"] == "function_call":
        arguments = item["arguments"]
        yield "response.function_call_arguments.delta", {"delta": arguments}
        yield "response.function_call_arguments.done", {"arguments": arguments, "name": item["name"]}
