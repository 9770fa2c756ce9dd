"""Contexts: what the policy has read and written in one sequence, and whether a request continues it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sorl_trl.endpoint.messages import ChatFormat, same_message, same_turn
from sorl_trl.endpoint.requests import Message
from sorl_trl.types import Observation, Turn


@dataclass(frozen=True)
class Answer:
    """A sampled turn, and the message that the client gets for it."""

    turn: Turn
    message: Message
    full_message: Message
    """The message with the client's stop string that cut it, if any: some clients append it themselves."""
    finish_reason: str
    """One of "stop", "length" and "tool_calls"."""
    has_ended: bool
    """Whether the policy ended its message."""
    answer_id: str
    """The same if a request is sent again."""
    prompt_tokens: int
    """How many tokens the policy has read."""
    opening: Sequence[int] = ()
    """The tokens that the message begins with, before the turn, because a call was demanded."""
    logprobs: Sequence[Mapping[str, Any]] | None = None
    """Those of its tokens, as APIs show them, if the request wants them and the engine reports them."""
    stop: str | None = None
    """The client's stop string that cut it."""
    created: int = field(default_factory=lambda: int(time.time()))
    """In seconds since 1970."""
    accepted: set[str] = field(default_factory=set)
    """Other texts into which the chat template rendered the same message."""


@dataclass(eq=False)
class Context:
    """What the policy has read and written in one sequence."""

    row: int
    tools: Sequence[Message]
    messages: list[Message] = field(default_factory=list)
    answers: dict[int, Answer] = field(default_factory=dict)
    """The policy's own messages, by their index in `messages`."""
    parts: list[Observation | Answer] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    is_busy: bool = False

    def follows(self, messages: Sequence[Message], tools: Sequence[Message]) -> list[Message] | None:
        """The messages, with the policy's own as it wrote them; None if others differ from those that it read.

        Thoughts that the client dropped are restored. If a message of the policy was edited, the edited version is
        kept.
        """
        if len(messages) < len(self.messages) or tools != self.tools:
            return None
        restored = [*messages]
        for place, (known, message) in enumerate(zip(self.messages, messages, strict=False)):
            answer = self.answers.get(place)
            if message["role"] != known["role"] or (answer is None and not same_message(known, message)):
                return None
            if answer is not None:
                restored[place] = restored_message(message, [answer])
        return restored

    def has_said(self, messages: Sequence[Message], tools: Sequence[Message]) -> bool:
        """Whether the messages begin with everything that the context has read or written."""
        restored = self.follows(messages, tools)
        return restored is not None and all(restored[place] is not messages[place] for place in self.answers)

    @property
    def text(self) -> str:
        return "".join(part.turn.text if isinstance(part, Answer) else part.text for part in self.parts)

    def end_in(self, text: str, chat: ChatFormat) -> int | None:
        """Where the context's content ends in `text`; None if the text differs from it."""
        place, before = 0, list[int]()
        for part in self.parts:
            known = part.turn if isinstance(part, Answer) else part
            if text.startswith(known.text, place):
                place += len(known.text)
            elif isinstance(part, Answer) and (end := self._end_of_rewritten(part, text, place, chat, before)):
                place = end
            else:
                return None
            before += known.token_ids
        return place

    def _end_of_rewritten(
        self, answer: Answer, text: str, place: int, chat: ChatFormat, before: Sequence[int]
    ) -> int | None:
        """Where a turn ends that the template renders differently, if its content is the same."""
        ends = [(found, end) for end in chat.ends if (found := text.find(end, place)) >= 0]
        if not ends:
            return None
        stop, end = min(ends)
        before = before[: len(before) - len(answer.opening)]
        rewritten = text[place:stop]
        if rewritten not in answer.accepted:
            read = chat.parse([*answer.opening, *chat.encode(rewritten + end)], before, self.tools)
            if not any(same_turn(read, each) for each in (answer.message, answer.full_message)):
                return None
            answer.accepted.add(rewritten)
        return stop + len(end) if answer.has_ended else stop


def all_restored(messages: Sequence[Message], known: Sequence[Answer]) -> list[Message]:
    """The messages, with the policy's own as it wrote them. Each known answer is used once."""
    left, restored = [*known], list[Message]()
    for message in messages:
        called = {call.get("id") for call in message.get("tool_calls") or ()}
        by_id = [each for each in left if called & {call["id"] for call in each.message.get("tool_calls") or ()}]
        own = next((each for each in by_id or left if restored_message(message, [each]) is not message), None)
        if own is not None:
            left = [each for each in left if each is not own]
        restored.append(message if own is None else restored_message(message, [own]))
    return restored


def restored_message(message: Message, known: Sequence[Answer]) -> Message:
    """The policy's own message, with the thoughts that the client dropped; other messages unchanged."""
    if message["role"] != "assistant":
        return message
    own = (written for each in known for written in (each.message, each.full_message))
    shows_thoughts = bool(message.get("reasoning_content"))
    found = next((written for written in own if same_turn(message, written, shows_thoughts)), None)
    return message if found is None else _with_ids(found, message)


def _with_ids(own: Message, message: Message) -> Message:
    """The policy's message with the client's ids for its calls."""
    pairs = zip(own.get("tool_calls") or (), message.get("tool_calls") or (), strict=False)
    calls = [{**call, "id": theirs.get("id") or call.get("id")} for call, theirs in pairs]
    return {**own, "tool_calls": calls} if calls else own
