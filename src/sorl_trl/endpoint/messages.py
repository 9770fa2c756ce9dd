"""The policy's chat format: renders messages with the chat template, and reads messages in sampled turns."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from os.path import commonprefix
from typing import Any

from trl.chat_template_utils import add_response_schema

from sorl_trl.endpoint.requests import BadRequest, Message, read_arguments
from sorl_trl.rollout.chat import RolloutSetup, reads_calls
from sorl_trl.rollout.protocol import MessageReader, calls_in
from sorl_trl.rollout.trajectories import decode
from sorl_trl.text import encodable, one_line

_PREFIX = 64
"""How many tokens before a turn its parser reads: a prompt's end may open the policy's thoughts."""
_THOUGHTS, _REST = ("reasoning_content", "thinking"), "rest"
"""The fields of response templates for thoughts, and ours for what belongs to no other."""
_OTHER_BRACKETS = str.maketrans("<>[]", "[]()")


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

    def opening(self, messages: Sequence[Message], tools: Sequence[Any], names: Sequence[str]) -> str:
        """How a call of one of the tools `names` begins, as the template writes it.

        It is empty without names, if the template shows no call after these messages, and if the policy writes
        thoughts first.
        """
        if not names:
            return ""
        asked, fields = self.render(messages, tools), self._response_template["fields"]
        thoughts = [fields[name] for name in _THOUGHTS if name in fields]
        if any(not re.search(f"(?:{field.get('close_pattern', '(?!)')})$", asked) for field in thoughts):
            return ""
        functions = [{"name": name, "arguments": given} for name in names for given in ({}, {"a": "b"}, {"b": 1})]
        calls = [{"id": "0" * 9, "type": "function", "function": function} for function in functions]
        own = [{"role": "assistant", "content": "", "tool_calls": [call]} for call in calls]
        try:
            shown = [self.render([*messages, each], tools, generation_prompt=False) for each in own]
        except BadRequest:
            return ""
        begins = commonprefix(shown)  # noqa: RUF071 (not of paths)
        return begins.removeprefix(asked) if begins.startswith(asked) else ""

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
        calls = calls_in(read)
        return None if calls is None else self._message(read, _in_utf8(calls))

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
    calls = [(each["name"], json.dumps(read_arguments(each["arguments"]), sort_keys=True)) for each in functions]
    return message["content"].strip(), thoughts and (message.get("reasoning_content") or "").strip(), calls
