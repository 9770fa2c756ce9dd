"""A protocol whose turns are whole chat messages, which the environment answers as a tool or as the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from sorl_trl.rollout.protocol import Frame, TagProtocol, chat_message_frame
from sorl_trl.types import Action, ActionKind, ToolCall


@dataclass(frozen=True)
class ChatProtocol(TagProtocol):
    """A turn is a message, which the policy ends and the environment interprets.

    A reply is a message of the chat template, from a tool or from the user (`Reply.role`). Templates without tools
    show a tool's message as the user's. Prompts must be messages.

    With `functions`, calls are parsed as TRL parses those of its own tools, with the tokenizer's `response_template`.
    Text that cannot be parsed is no call.
    """

    tools: tuple[str, ...] = ()
    functions: tuple[dict[str, Any], ...] = field(default=(), hash=False)
    """JSON schemas of the tools that the chat template shows. A `ToolBox` adds its own."""
    message_ends: tuple[str, ...] = ()
    """The tokenizer's special tokens. One of them ends a message, not always the end-of-sequence token."""
    tokenizer: PreTrainedTokenizerBase | None = field(default=None, repr=False, compare=False)
    """The policy's tokenizer."""

    turns_are_messages: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.tools:
            raise ValueError(f"tools={self.tools!r} must be empty: the environment reads whole messages")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Empty, because a turn ends at an end-of-sequence token."""
        return ()

    def in_chat(
        self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None
    ) -> ChatProtocol:
        """The protocol with the messages of a chat template. Custom frames stay.

        Raises what `chat_message_frame` raises.
        """
        plain, user = TagProtocol(), chat_message_frame(tokenizer, template_kwargs)
        tool = _tool_frame(tokenizer, template_kwargs) or user
        return replace(
            self,
            information_frame=tool if self.information_frame == plain.information_frame else self.information_frame,
            message_frame=user if self.message_frame == plain.message_frame else self.message_frame,
            message_ends=_special_tokens(tokenizer),
            tokenizer=tokenizer,
        )

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise ValueError if prompts are plain text, or if `functions` are given without a way to parse calls."""
        if not self.message_ends:
            raise ValueError("`ChatProtocol` needs prompts that are messages, such as [{'role': 'user', …}]")
        if self.functions and getattr(tokenizer, "response_template", None) is None:
            raise ValueError(
                "the tokenizer has no `response_template`, with which tool calls are parsed: set one; "
                "`trl.chat_template_utils.add_response_schema(tokenizer)` has those of the chat templates that TRL "
                "knows"
            )

    def parse(self, text: str) -> Action:
        """The whole message without the tokens that end it, and its calls."""
        calls = self._calls(text) if self.functions else ()
        while end := next(filter(text.endswith, self.message_ends), ""):
            text = text.removesuffix(end)
        return Action(ActionKind.MESSAGE, text.strip(), calls=calls)

    def _calls(self, text: str) -> tuple[ToolCall, ...]:
        assert self.tokenizer is not None
        begun = self.message_frame.suffix  # it may begin the message, with an opening tag of its thoughts
        try:
            message = self.tokenizer.parse_response(text, prefix=begun, tools=[*self.functions])
            calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
        except (ValueError, TypeError, AttributeError, RecursionError):
            return ()
        if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
            return ()
        read = ((call["name"], call.get("arguments")) for call in calls)
        return tuple(ToolCall(name, {} if arguments is None else arguments) for name, arguments in read)


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The tokens that the tokenizer declares special, the longest first, because one may end in another."""
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return tuple(sorted({*tokenizer.all_special_tokens, *added}, key=lambda token: (-len(token), token)))


def _tool_frame(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None) -> Frame | None:
    """The text around a tool's message; None if the template shows no such message, or only after a call."""
    try:
        return chat_message_frame(tokenizer, template_kwargs, "tool")
    except Exception:  # a template may raise anything
        return None
