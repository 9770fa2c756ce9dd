"""Turns that are whole messages of a chat: the environment reads each, and answers as a tool or as the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from sorl_trl.rollout.protocol import Frame, TagProtocol, chat_message_frame
from sorl_trl.types import Action, ActionKind, ToolCall


@dataclass(frozen=True)
class ChatProtocol(TagProtocol):
    """A turn is a message, which ends where the policy ends it. What it asks for, the environment finds out.

    A reply is a message of the chat template: a tool's, or the user's (`Reply.role`). Templates that know no tools say
    what a tool says as the user. Prompts must be messages.

    With `functions`, calls are read as TRL reads those of its own tools: by the tokenizer's `response_template`. What
    cannot be read is no call.
    """

    tools: tuple[str, ...] = ()
    functions: tuple[dict[str, Any], ...] = field(default=(), hash=False)
    """JSON schemas of the tools that the chat template shows. A `ToolBox` puts its own here."""
    message_ends: tuple[str, ...] = ()
    """The special tokens of the tokenizer: one of them ends a message, not always its end-of-sequence token."""
    tokenizer: PreTrainedTokenizerBase | None = field(default=None, repr=False, compare=False)
    """Of the policy."""

    turns_are_messages: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.tools:
            raise ValueError(f"tools={self.tools!r} must be empty: the environment reads whole messages")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """None: a turn ends at an end-of-sequence token."""
        return ()

    def in_chat(
        self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None
    ) -> ChatProtocol:
        """The protocol with the messages of a chat template, but for frames of one's own.

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
        """Raise ValueError where prompts are plain text, and where nobody knows how calls are written."""
        if not self.message_ends:
            raise ValueError("`ChatProtocol` needs prompts that are messages, such as [{'role': 'user', …}]")
        if self.functions and getattr(tokenizer, "response_template", None) is None:
            raise ValueError(
                "the tokenizer has no `response_template`, by which calls of tools are read: "
                "`trl.chat_template_utils.add_response_schema(tokenizer)` gives it one"
            )

    def parse(self, text: str) -> Action:
        """All of the message but the tokens that end it."""
        calls = self._calls(text) if self.functions else ()
        while end := next(filter(text.endswith, self.message_ends), ""):
            text = text.removesuffix(end)
        return Action(ActionKind.MESSAGE, text.strip(), calls=calls)

    def _calls(self, text: str) -> tuple[ToolCall, ...]:
        assert self.tokenizer is not None
        begun = self.message_frame.suffix  # which may begin the message, with a tag of its thoughts
        try:
            message = self.tokenizer.parse_response(text, prefix=begun, tools=[*self.functions])
            calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
        except (ValueError, TypeError, AttributeError, RecursionError):
            return ()
        if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
            return ()
        return tuple(ToolCall(call["name"], call.get("arguments") or {}) for call in calls)


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Those that the tokenizer declares special; the longest first, for one may end in another."""
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return tuple(sorted({*tokenizer.all_special_tokens, *added}, key=lambda token: (-len(token), token)))


def _tool_frame(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None) -> Frame | None:
    """What surrounds a tool's message; None where the template shows none, or none without a call in its own form."""
    try:
        return chat_message_frame(tokenizer, template_kwargs, "tool")
    except Exception:  # whatever a template's own code raises
        return None
