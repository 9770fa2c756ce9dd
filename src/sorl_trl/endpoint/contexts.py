"""Contexts: what the policy has read and written in one sequence, and whether a request continues it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

from sorl_trl.endpoint.messages import ChatFormat, Message, same_message, same_turn
from sorl_trl.types import Observation, Turn


@dataclass(frozen=True)
class Answer:
    """A sampled turn, and the message that the client gets for it."""

    turn: Turn
    message: Message
    full_message: Message
    """The message with the stop string at which the client had it cut, if any: some clients append it themselves."""
    finish_reason: str
    """As the API says it: "stop", "length" or "tool_calls"."""
    has_ended: bool
    """Whether the policy ended its message."""
    accepted: set[str] = field(default_factory=set)
    """Other texts that the chat template has made of the same message."""


@dataclass(eq=False)
class Context:
    """What the policy has read and written in one sequence."""

    row: int
    tools: Sequence[Message]
    messages: list[Message] = field(default_factory=list)
    answers: dict[int, Answer] = field(default_factory=dict)
    """The policy's own messages, by their place among `messages`."""
    parts: list[Observation | Answer] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    is_busy: bool = False

    def follows(self, messages: Sequence[Message], tools: Sequence[Message]) -> list[Message] | None:
        """The messages with the policy's own as it wrote them; None if others differ from those that it has read.

        Thoughts that the client has dropped are put back. An own message that says something else stays as it is.
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
        """Whether it has read or said all that messages begin with."""
        restored = self.follows(messages, tools)
        return restored is not None and all(restored[place] is not messages[place] for place in self.answers)

    @property
    def text(self) -> str:
        return "".join(part.turn.text if isinstance(part, Answer) else part.text for part in self.parts)

    def end_in(self, text: str, chat: ChatFormat) -> int | None:
        """Where in `text` that which the context holds ends; None if the text says anything else."""
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
        """Where a turn that the template writes in other words ends, if it still says the same."""
        ends = [(found, end) for end in chat.ends if (found := text.find(end, place)) >= 0]
        if not ends:
            return None
        stop, end = min(ends)
        rewritten = text[place:stop]
        if rewritten not in answer.accepted:
            read = chat.parse(chat.encode(rewritten + end), before, self.tools)
            if not any(same_turn(read, each) for each in (answer.message, answer.full_message)):
                return None
            answer.accepted.add(rewritten)
        return stop + len(end) if answer.has_ended else stop


def all_restored(messages: Sequence[Message], known: Sequence[Answer]) -> list[Message]:
    """The messages with the policy's own as it wrote them, each of which is taken once."""
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
    """The policy's own message, with the thoughts that the client has dropped; others as they are."""
    if message["role"] != "assistant":
        return message
    own = (said for each in known for said in (each.message, each.full_message))
    shows_thoughts = bool(message.get("reasoning_content"))
    found = next((said for said in own if same_turn(message, said, shows_thoughts)), None)
    return message if found is None else _with_ids(found, message)


def _with_ids(own: Message, message: Message) -> Message:
    """The policy's message with the ids that the client gives its calls."""
    restored = copy.deepcopy(own)
    for call, theirs in zip(restored.get("tool_calls") or (), message.get("tool_calls") or (), strict=False):
        call["id"] = theirs.get("id") or call.get("id")
    return restored
