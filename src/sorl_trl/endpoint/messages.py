"""Messages: parses requests, renders them with the chat template, and turns sampled turns into messages."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any, TypeAlias

from trl.chat_template_utils import add_response_schema

from sorl_trl.rollout.chat import RolloutSetup, reads_calls
from sorl_trl.rollout.protocol import LEVELS, MessageReader
from sorl_trl.rollout.trajectories import decode
from sorl_trl.text import encodable, nests, one_line

Message: TypeAlias = dict[str, Any]
"""A message as chat templates read it: `role`, `content`, and optionally `reasoning_content`, `tool_calls` (with
arguments as objects), `name` and `tool_call_id`."""

_PREFIX = 64
"""How many tokens before a turn its parser reads: a prompt's end may open the policy's thoughts."""
_THOUGHTS, _REST = ("reasoning_content", "thinking"), "rest"
"""The fields of response templates for thoughts, and ours for what belongs to no other."""
_OTHER_BRACKETS = str.maketrans("<>[]", "[]()")


class BadRequest(ValueError):
    """A request that cannot be served, HTTP 400. `field` names the offending part."""

    def __init__(self, message: str, field: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.field, self.code = field, code


@dataclass(frozen=True)
class Request:
    """The content of one API call, in either of the two APIs."""

    model: str
    messages: Sequence[Message]
    tools: Sequence[Message] = ()
    limit: int | None = None
    """The client's token limit."""
    stops: tuple[str, ...] = ()
    schema: Mapping[str, Any] | None = None
    """The JSON schema of the answer."""
    may_call: bool = True
    """False if the policy must not call a tool (`tool_choice`)."""


@dataclass(frozen=True)
class ChatFormat:
    """The policy's chat template and parser, without any conversation state."""

    setup: RolloutSetup

    @classmethod
    def of(cls, setup: RolloutSetup) -> ChatFormat:
        """The format of a rollout's tokenizer, with the call parser that TRL provides for its chat template.

        Raises ValueError if the tokenizer has no chat template.
        """
        chat = cls(setup)
        if chat._template is None:
            raise ValueError(
                "`processing_class` has no chat template, but an agent's requests are messages: use a chat model's "
                "tokenizer, or set its `chat_template`."
            )
        if not reads_calls(setup.tokenizer):
            with suppress(ValueError):  # an unknown template: without tools, turns need no parser
                add_response_schema(setup.processing_class)
        return chat

    @property
    def _template(self) -> Any:
        return self.setup.chat_template or self.setup.processing_class.chat_template

    @property
    def tokenizer(self) -> Any:
        return self.setup.tokenizer

    @cached_property
    def ends(self) -> list[str]:
        """The texts of the tokens that end a message."""
        return [decode(self.tokenizer, [token]) for token in self.setup.eos_token_ids]

    @cached_property
    def parses_calls(self) -> bool:
        return reads_calls(self.tokenizer)

    @cached_property
    def _control_tokens(self) -> re.Pattern[str]:
        tokens = sorted({*self.tokenizer.all_special_tokens, *self.ends} - {""}, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, tokens)) or "(?!)")

    def check_tools(self, tools: Sequence[Any]) -> None:
        """Raise BadRequest for tools if there is no parser for calls in the policy's turns."""
        if tools and not self.parses_calls:
            raise BadRequest(
                "`tools` are given, but TRL has no call parser for the chat template: for a ChatML model, give the "
                "trainer `processing_class=chatml_tools(tokenizer)`; for others, set `tokenizer.response_template`",
                "tools",
                "unsupported",
            )

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = (), generation_prompt: bool = True) -> str:
        """The text that the policy reads. Raises BadRequest if the template cannot render the messages."""
        try:
            text = self.setup.processing_class.apply_chat_template(
                [*messages],
                tools=[*tools] or None,
                chat_template=self.setup.chat_template,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **self.setup.chat_template_kwargs,
            )
        except Exception as error:  # a template may raise anything
            raise BadRequest(
                f"the chat template cannot render these messages: {one_line(error)}", "messages", "chat_template"
            ) from error
        return encodable(str(text), "?")

    def sanitized(self, text: str) -> str:
        """A user's or tool's text, with other brackets around the text of special tokens.

        Otherwise, a page found by a tool could end its own message and begin another.
        """
        return self._control_tokens.sub(lambda token: token[0].translate(_OTHER_BRACKETS) or " ", text)

    def split_end(self, text: str) -> tuple[str, str]:
        """A turn's text without the token that ends it, and that token's text."""
        end = next(filter(text.endswith, self.ends), "")
        return text.removesuffix(end), end

    @cached_property
    def _response_template(self) -> dict[str, Any]:
        """The tokenizer's, but without losses: a field's later text joins the earlier, and the rest is kept, too.

        Thoughts are text like any other if the chat template does not mention them: it would not show them again.
        """
        given = self.tokenizer.response_template
        source = re.sub(r"{#.*?#}", "", str(self._template), flags=re.DOTALL)
        knows_thoughts = re.search("think|reason", source, re.IGNORECASE)
        fields = {
            name: {"repeats": True, "join": "\n", **field} if field.get("content", "text") == "text" else field
            for name, field in given["fields"].items()
            if knows_thoughts or name not in _THOUGHTS
        }
        if all("open" in field or "open_pattern" in field for field in fields.values()):
            ends = {name.replace("start_anchor", "close"): given[name] for name in given if "start_anchor" in name}
            fields[_REST] = {"repeats": True, "join": "\n", **ends}
        return {**given, "fields": fields}

    def parse(self, token_ids: Sequence[int], before: Sequence[int], tools: Sequence[Any] = ()) -> Message:
        """The message of a turn: its content, thoughts and calls. What cannot be read stays text."""
        written = decode(self.tokenizer, token_ids)
        text = self.split_end(written)[0]
        message = self._read(written, before, tools) if self.parses_calls else None
        if message in (None, {"role": "assistant", "content": text.strip()}):
            return {"role": "assistant", "content": text}  # as sampled: clients append to it, or send it back
        return message

    def _read(self, written: str, before: Sequence[int], tools: Sequence[Any]) -> Message | None:
        """The message in a turn's text; None if the parser cannot read it, or if a call nests too deeply."""
        prefix = decode(self.tokenizer, before[-_PREFIX:])
        try:
            read = MessageReader(self.tokenizer).parse_response(
                written, schema=self._response_template, prefix=prefix, tools=[*tools] or None
            )
        except ValueError:
            return None
        calls = [call.get("function", call) if isinstance(call, dict) else call for call in read.get("tool_calls", ())]
        are_named = all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls)
        if not are_named:
            return None
        return self._message(read, _in_utf8(calls))

    def _message(self, read: Mapping[str, Any], calls: Sequence[Mapping[str, Any]]) -> Message:
        """The message of a turn's parts, each without the token that ends the turn."""

        def joined(*names: str) -> str:
            return "\n".join(self.split_end(read[name])[0].strip() for name in names if read.get(name))

        # Some templates show no content beside calls.
        content, thoughts = (["content"], [*_THOUGHTS, _REST]) if calls else ([_REST, "content"], _THOUGHTS)
        message: Message = {"role": "assistant", "content": joined(*content)}
        if shown := joined(*thoughts):
            message["reasoning_content"] = shown
        if calls:
            functions = [{"name": call["name"], "arguments": call.get("arguments") or {}} for call in calls]
            message["tool_calls"] = [{"type": "function", "function": each} for each in functions]
        return message


def _in_utf8(value: Any) -> Any:
    """JSON data without lone surrogates, which JSON can express but clients cannot send back."""
    return json.loads(encodable(json.dumps(value, ensure_ascii=False), "?"))


def same_turn(one: Message, other: Message, thoughts: bool = True) -> bool:
    """Whether two messages of the policy agree in content (except outer spaces), thoughts and calls."""
    return _essence(one, thoughts) == _essence(other, thoughts)


def same_message(one: Message, other: Message) -> bool:
    """Whether two messages are the same, except for the ids of their calls."""
    return one["role"] == other["role"] and one["content"] == other["content"] and same_turn(one, other)


def _essence(message: Message, thoughts: bool) -> tuple[Any, ...]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(each["name"], json.dumps(_read_arguments(each["arguments"]), sort_keys=True)) for each in functions]
    return message["content"].strip(), thoughts and (message.get("reasoning_content") or "").strip(), calls


# -------------------------------------------------------------------------------------------------------------------
# From a request's JSON
# -------------------------------------------------------------------------------------------------------------------

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def read_messages(given: Any) -> list[Message]:
    """The messages of a Chat Completions request. Raises BadRequest if they are malformed or not text."""
    if not isinstance(given, list) or not given or not all(isinstance(each, dict) for each in given):
        raise BadRequest("`messages` must be a list with at least one message", "messages")
    read = [read_message(each, f"messages[{number}]") for number, each in enumerate(given)]
    return in_order_of_calls(read)


def read_message(given: Mapping[str, Any], field: str) -> Message:
    """The message in a request's `field`."""
    role = _ROLES.get(str(given.get("role")))
    if role is None:
        raise BadRequest(f"`{field}.role` is {given.get('role')!r}, but must be one of {[*_ROLES]}", f"{field}.role")
    message: Message = {"role": role, "content": read_text(given.get("content"), f"{field}.content")}
    if role == "assistant":
        if thoughts := given.get("reasoning_content") or given.get("reasoning"):
            message["reasoning_content"] = read_text(thoughts, f"{field}.reasoning_content")
        if calls := given.get("tool_calls"):
            message["tool_calls"] = [
                _call(call, f"{field}.tool_calls") for call in read_list(calls, f"{field}.tool_calls")
            ]
    elif role == "tool":
        message |= {name: str(given[name]) for name in ("tool_call_id", "name") if given.get(name)}
    return message


def _call(given: Any, field: str) -> Message:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"`{field}` has {given!r:.200}, but a call must have a `function` with a `name`", field)
    return tool_call(given.get("id"), function["name"], function.get("arguments"))


def in_order_of_calls(messages: Sequence[Message]) -> list[Message]:
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
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": _read_arguments(arguments)}}


def _read_arguments(given: Any) -> Any:
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


def read_tools(given: Any, function_of: Any) -> list[Message]:
    """The tools of a request, as templates show them. Raises BadRequest for any other than functions.

    `function_of` extracts the function's description from a tool.
    """
    tools = []
    for tool in read_list(given, "tools"):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            raise BadRequest(
                f"`tools` has one of type {kind!r}, but only the agent's own functions are supported",
                "tools",
                "hosted",
            )
        described = read_object(function_of(tool), "tools")
        if not isinstance(described.get("name"), str):
            raise BadRequest(f"`tools` has {tool!r:.200}, but a function must have a `name`", "tools")
        shown = {name: described[name] for name in ("name", "description", "parameters") if described.get(name)}
        tools.append({"type": "function", "function": shown})
    return tools
