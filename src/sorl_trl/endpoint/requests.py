"""What the APIs share: requests that no longer depend on one, and how their JSON is read and answers are written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from math import inf
from typing import Any, TypeAlias

from sorl_trl.rollout.protocol import LEVELS
from sorl_trl.text import nests

Body: TypeAlias = Mapping[str, Any]
"""The JSON of a request."""
Message: TypeAlias = dict[str, Any]
"""A message as chat templates read it: `role`, `content`, and optionally `reasoning_content`, `tool_calls` (with
arguments as objects), `name` and `tool_call_id`."""

IGNORED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "top_logprobs"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("reasoning_effort", "reasoning", "thinking", "chat_template_kwargs"),
)
"""Client settings for sampling and templates that are ignored: the trainer decides both."""
HARMLESS = {
    *("user", "safety_identifier", "metadata", "store", "include", "service_tier", "priority", "request_id"),
    *("prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_salt"),
    *("cache_control", "diagnostics", "inference_geo", "speed", "user_profile_id"),
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
"""Fields that are unsupported, or not supported by all APIs, and the values at which they request nothing."""
_HOSTED = ("web_search", "web_fetch", "file_search", "code_interpreter", "code_execution", "image_generation", "mcp")
"""How the types of tools begin that a provider runs: agents lack nothing else if the policy is not told of them."""
_LEVELS = 128
"""How deep a request may nest, so that whatever walks over it reaches its end: twice as deep as calls. Our choice."""
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_COMMON = {"model", "tools", "tool_choice", "parallel_tool_calls", "stream", *_LIMITS}
"""Fields that have an effect in every API."""
_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class BadRequest(ValueError):
    """A request that cannot be served. `field` names the offending part, and `status` is that of HTTP."""

    def __init__(self, message: str, field: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.field, self.code, self.status = field, code, status


@dataclass(frozen=True)
class Request:
    """The content of one API call, whatever its API."""

    model: str
    """The agent's name."""
    messages: Sequence[Message]
    tools: Sequence[Message] = ()
    limit: int | None = None
    """The client's token limit."""
    stops: tuple[str, ...] = ()
    schema: Mapping[str, Any] | None = None
    """The JSON schema of the answer."""
    may_call: bool = True
    """False if the policy must not call a tool (`tool_choice`)."""
    must_call: Sequence[str] = ()
    """The tools of which the policy must call one."""
    logprobs: bool = False
    own: int = 0
    """How many of the first messages are only this request's, although later ones continue it (`instructions`)."""
    without_effect: Mapping[str, str] = field(default_factory=dict)
    """Why fields of the request have no effect, by name."""


def model_of(body: Body) -> str:
    """The agent's name."""
    return str(body.get("model") or "policy")


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


def read_request(
    body: Body,
    messages: Sequence[Message],
    function_of: Callable[[Mapping[str, Any]], Any],
    fields: Set[str],
    schema: Mapping[str, Any] | None,
    stops: Sequence[str] = (),
) -> Request:
    """A request with the fields that all APIs have. Raises BadRequest if one is malformed or unsupported.

    `function_of` extracts a function's description from a tool, None if it is none. `fields` are those that have an
    effect in the API alone. For the others, see `Request`.
    """
    for name, nothing in REFUSED.items():
        if name not in fields and body.get(name) not in nothing:
            allowed = " or ".join(repr(each) for each in nothing if each is not None) or "left out"
            raise BadRequest(f"`{name}` is {body[name]!r:.200}, but must be {allowed}", name, "unsupported")
    limits = {name: body[name] for name in _LIMITS if body.get(name) is not None}
    for name, value in limits.items():
        if not is_count(value):
            raise BadRequest(f"`{name}` is {value!r}, but must be at least 1", name)
    tools = _read_tools(body.get("tools"), function_of)
    return Request(
        model=model_of(body),
        messages=_in_order_of_calls(messages),
        tools=tools,
        limit=min(limits.values(), default=None),
        stops=tuple(stops),
        schema=schema,
        may_call=body.get("tool_choice") != "none",
        must_call=_must_call(body.get("tool_choice"), [tool["function"]["name"] for tool in tools]),
        logprobs=bool(body.get("logprobs"))
        or "message.output_text.logprobs" in read_list(body.get("include"), "include"),
        without_effect=_without_effect(body, fields),
    )


def is_count(value: Any, most: float = inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def read_stops(given: Any, field: str) -> Sequence[str]:
    """Stop strings. Raises BadRequest for anything else."""
    stops = [given] if isinstance(given, str) else given or ()
    if not isinstance(stops, Sequence) or not all(isinstance(each, str) and each for each in stops):
        raise BadRequest(
            f"`{field}` is {given!r:.200}, but must be a string or a list of strings that are not empty", field
        )
    return stops


def _must_call(choice: Any, names: Sequence[str]) -> Sequence[str]:
    """The tools of which `tool_choice` demands a call. Raises BadRequest for a function that is not offered."""
    if not _is_function(choice):
        return names if choice == "required" else ()
    name: Any = choice.get("name") or read_object(choice.get("function"), "tool_choice").get("name")
    if name not in names:
        raise BadRequest(f"`tool_choice` is {name!r}, but must be one of the tools {names}", "tool_choice")
    return [name]


def _is_function(given: Any) -> bool:
    return isinstance(given, Mapping) and given.get("type") == "function"


def _without_effect(body: Body, fields: Set[str]) -> dict[str, str]:
    parts = {f"text.{name}": part for name, part in (body.get("text") or {}).items()} if "text" in fields else {}
    given = {**body, **parts}
    found = {
        name: "the trainer's config decides" if name in IGNORED else "the endpoint does not support it"
        for name in given.keys() - fields - _COMMON - HARMLESS - REFUSED.keys()
        if given[name] not in (None, [], {})
    }
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none", "required") and not _is_function(choice):
        found["tool_choice"] = "the endpoint does not know its type"
    if body.get("parallel_tool_calls") is False:
        found["parallel_tool_calls"] = "the policy cannot be kept from making several calls at once"
    if hosted := [str(tool["type"]) for tool in _flattened(body.get("tools")) if _is_hosted(tool)]:
        found["tools"] = f"the endpoint has none of its own, and leaves out {', '.join(hosted)}"
    return found


def read_schema(form: Mapping[str, Any], given: Any, field: str) -> Mapping[str, Any] | None:
    """The JSON schema of an answer in some form; for "json_schema", the `given` one."""
    if form.get("type") == "json_object":
        return {"type": "object"}
    if form.get("type") != "json_schema":
        return None
    if not isinstance(given, dict):
        raise BadRequest(f"`{field}` has the schema {given!r:.200}, but must have an object", field)
    return given


def read_message(given: Mapping[str, Any], field: str) -> Message:
    """The message in a request's `field`."""
    role = _ROLES.get(str(given.get("role")))
    if role is None:
        raise BadRequest(f"`{field}.role` is {given.get('role')!r}, but must be one of {[*_ROLES]}", f"{field}.role")
    message: Message = {"role": role, "content": read_text(given.get("content"), f"{field}.content")}
    if role == "assistant":
        if thoughts := given.get("reasoning_content") or given.get("reasoning"):
            message["reasoning_content"] = read_text(thoughts, f"{field}.reasoning_content")
        name = f"{field}.tool_calls"
        if calls := read_list(given.get("tool_calls") or None, name):
            message["tool_calls"] = [_call(call, name) for call in calls]
    elif role == "tool":
        message |= {name: str(given[name]) for name in ("tool_call_id", "name") if given.get(name)}
    return message


def _call(given: Any, field: str) -> Message:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"`{field}` has {given!r:.200}, but a call must have a `function` with a `name`", field)
    return tool_call(given.get("id"), function["name"], function.get("arguments"))


def _in_order_of_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages, with results in the order of their calls: many templates show no ids, but only the order.

    Results stay in the order in which they came if the id of one is that of no call, or of several.
    """
    ordered: list[Message] = []
    for is_result, run in groupby(messages, lambda message: message["role"] == "tool"):
        results = [*run]
        ids = [call["id"] for call in ordered[-1].get("tool_calls", ())] if is_result and ordered else []
        if all(ids.count(result.get("tool_call_id")) == 1 for result in results):
            results.sort(key=lambda result: ids.index(result["tool_call_id"]))
        ordered += results
    return ordered


def tool_call(call_id: Any, name: str, arguments: Any) -> Message:
    """A call as templates read it."""
    call_id = None if call_id is None else str(call_id)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": read_arguments(arguments)}}


def read_arguments(given: Any) -> Any:
    """The arguments of a call as an object, or as text if they are not JSON; policies also write JSON as text."""
    if isinstance(given, str):
        with suppress(ValueError, RecursionError):  # brackets may nest too deeply
            read = json.loads(given) if given.strip() else {}
            return given if nests(read, LEVELS) else read or {}
    return given or {}


def read_object(given: Any, field: str) -> Mapping[str, Any]:
    """An object, empty if it is left out. Raises BadRequest for anything else."""
    if not isinstance(given, Mapping | None):
        raise BadRequest(f"`{field}` is {given!r:.200}, but must be an object", field)
    return given or {}


def read_list(given: Any, field: str) -> list[Any]:
    """A list, empty if it is left out. Raises BadRequest for anything else."""
    if not isinstance(given, list | None):
        raise BadRequest(f"`{field}` is {given!r:.200}, but must be a list", field)
    return given or []


def read_text(content: Any, field: str) -> str:
    """Content as one text. Raises BadRequest if part of it is not text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRequest(f"`{field}` is {content!r:.200}, but must be text or a list of parts", field)
    texts = []
    for part in content:
        if isinstance(part, dict):
            kind = part.get("type")
            part = part.get("refusal") if kind == "refusal" else part.get("text") if _is_text(kind) else None
        if not isinstance(part, str):
            raise BadRequest(
                f"`{field}` has a part that is not text: the policy reads only text", field, "unsupported"
            )
        texts.append(part)
    return "".join(texts)


def _is_text(kind: Any) -> bool:
    return kind in ("text", "input_text", "output_text", "summary_text", "reasoning_text")


def _read_tools(given: Any, function_of: Callable[[Mapping[str, Any]], Any]) -> list[Message]:
    """The tools of a request, as templates show them. Raises BadRequest, which names all tools of other kinds."""
    offered = [tool for tool in _flattened(read_list(given, "tools")) if not _is_hosted(tool)]
    described = [function_of(tool) for tool in offered]
    if others := [tool for tool, function in zip(offered, described, strict=True) if function is None]:
        named = ", ".join(f"{tool.get('type')!r} ({tool.get('name', 'unnamed')})" for tool in others)
        raise BadRequest(f"`tools` has types {named}, but only functions are supported", "tools", "hosted")
    tools = []
    for function in described:
        if not isinstance(read_object(function, "tools").get("name"), str):
            raise BadRequest(f"`tools` has {function!r:.200}, but a function must have a `name`", "tools")
        shown = {name: function[name] for name in ("name", "description", "parameters") if function.get(name)}
        tools.append({"type": "function", "function": shown})
    return tools


def _flattened(given: Any) -> list[Mapping[str, Any]]:
    """Tools, with those of a namespace in its place. Raises BadRequest if one is no object."""
    tools: list[Mapping[str, Any]] = []
    for each in given or ():
        tool = read_object(each, "tools")
        tools += _flattened(read_list(tool.get("tools"), "tools")) if tool.get("type") == "namespace" else [tool]
    return tools


def _is_hosted(tool: Mapping[str, Any]) -> bool:
    return str(tool.get("type")).startswith(_HOSTED)


def arguments_of(call: Mapping[str, Any]) -> str:
    """The arguments of a call in the API's form: as JSON, or as the text that the policy wrote instead."""
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def event(data: Mapping[str, Any], name: str | None = None) -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()
