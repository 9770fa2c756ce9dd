"""The API calls of one trajectory, as turns in contexts. Tokens are kept exactly as they were read and sampled.

A request is rendered by the chat template and compared with each context, as text. If it continues a context, only the
new text is encoded, so earlier tokens do not change. Otherwise, a new context begins.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from operator import ne
from typing import Any

from sorl_trl.endpoint.contexts import Answer, Context, all_restored, restored_message
from sorl_trl.endpoint.messages import ChatFormat
from sorl_trl.endpoint.requests import BadRequest, Message, Request
from sorl_trl.rollout import Generation
from sorl_trl.rollout.routing import newly_read
from sorl_trl.rollout.trajectories import decode
from sorl_trl.types import Action, ActionKind, Observation, StopReason, ToolCall, ToolResult, Trajectory, Turn

FIRST, EXTENDED, SPLICED, NEW_CONTEXT = "first", "extended", "spliced", "new_context"
"""How a request continues its trajectory: it begins it; it continues a context verbatim; it continues a context, but a
turn came back reformatted (spaces in JSON or at its end), and the sampled version is kept; or it begins a new
context."""


@dataclass(eq=False)
class Call:
    """An API call: what the policy read for it, and the turn that was sampled."""

    request: Request
    context: Context
    kind: str
    messages: list[Message]
    """All messages of the context, as the policy reads them."""
    observations: list[Observation]
    cause: str | None = None
    """Why a new context began: the "template" renders earlier messages differently, the "client" rewrites the policy's
    messages, or the "history" or its tools change. One without a message of the policy, such as a sub-agent's first,
    has no cause."""
    known: list[Message] = field(default_factory=list)
    """The messages that the context already had."""
    prompt_tokens: int = 0
    """How many tokens the policy reads."""
    limit: int = 0
    """The most tokens that its turn may have, once known."""
    neutralized: int = 0
    """How many of its new messages contained the text of special tokens."""
    opening: tuple[int, ...] = ()
    """The last tokens that the policy reads: the beginning of the call that the request demands."""
    answer: Answer | None = None

    @property
    def new_messages(self) -> list[Message]:
        """The messages after the policy's last one."""
        return self.messages[_after_last_turn(self.messages) :]


class Conversation:
    """All API calls of one trajectory. Only one thread uses it.

    Context number k is generated in row `row + k * stride` of the engine.
    """

    def __init__(self, chat: ChatFormat, row: int = 0, stride: int = 1, most_contexts: int | None = None) -> None:
        self._chat = chat
        self._row, self._stride, self._most_contexts = row, stride, most_contexts
        self._contexts: list[Context] = []
        self.calls: list[Call] = []
        """In the order of their requests."""

    # ---------------------------------------------------------------------------------------------------------------
    # A call
    # ---------------------------------------------------------------------------------------------------------------

    def begin(self, request: Request) -> Call:
        """Make the call of a request and add it to a context. Raises BadRequest if rendering fails."""
        self._chat.check_tools(request.tools)
        messages = [
            {**each, "content": self._chat.sanitized(each["content"])} if each["role"] in ("user", "tool") else each
            for each in request.messages
        ]
        call = self._continued(request, messages) or self._begun(request, messages)
        call.known = call.context.messages
        new = _after_last_turn(messages)
        call.neutralized = sum(map(ne, messages[new:], request.messages[new:]))
        if opening := self._chat.opening(call.messages, request.tools, request.must_call):
            call.opening = tuple(self._chat.encode(opening))
            call.observations.append(Observation(call.opening, opening))
        call.context.parts += call.observations
        call.context.token_ids += chain.from_iterable(each.token_ids for each in call.observations)
        call.prompt_tokens = len(call.context.token_ids)
        call.context.is_busy = True
        self._contexts.remove(call.context)
        self._contexts.append(call.context)  # as the latest in use
        self.calls.append(call)
        return call

    def cancel(self, call: Call) -> None:
        """Drop a call that no client waits for, as if it had never been made, unless others follow it."""
        context, read = call.context, [each.token_ids for each in call.observations]
        if call not in self.calls:  # forgotten with its context
            return
        if call.answer is not None:
            if context.is_busy or context.parts[-1] is not call.answer:
                return
            read.append(call.answer.turn.token_ids)
            context.messages = call.known
            del context.answers[len(call.messages)]
        del context.parts[len(context.parts) - len(read) :]
        del context.token_ids[len(context.token_ids) - sum(map(len, read)) :]
        context.is_busy = False
        self.calls.remove(call)
        if not context.parts:
            self._contexts.remove(context)

    def finish(self, call: Call, generation: Generation) -> Answer:
        """Record the turn sampled for a call, and make the message for the client."""
        request, context = call.request, call.context
        text = decode(self._chat.tokenizer, generation.token_ids)
        content, end = self._chat.split_end(text)
        full = message = self._parsed(generation.token_ids, call)
        cut, stop = min(
            ((place, stop) for stop in request.stops if (place := content.find(stop)) >= 0), default=(0, None)
        )
        if stop is not None:
            message = self._parsed(self._chat.encode(content[:cut] + self._chat.ends[0]), call)
        for call_of_tool in message.get("tool_calls") or ():
            call_of_tool["id"] = uuid.uuid4().hex[:9]  # Mistral's templates want just as many letters
        functions = [each["function"] for each in message.get("tool_calls") or ()]
        calls = tuple(ToolCall(each["name"], each["arguments"]) for each in functions)
        new = sum(len(each.token_ids) for each in call.observations)
        turn = Turn(
            generation.token_ids,
            text,
            Action(ActionKind.MESSAGE, message["content"], calls=calls),
            generation.logprobs,
            versions=generation.versions,
            agent=request.model,
            routes=newly_read(generation.routes, max(call.prompt_tokens - new - 1, 0)),
        )
        reason = "length" if not end and stop is None else "tool_calls" if calls else "stop"
        answer = call.answer = Answer(
            *(turn, message, full, reason, bool(end), uuid.uuid4().hex[:24], call.prompt_tokens, call.opening),
            self._logprobs(turn) if request.logprobs else None,
            stop,
        )
        context.answers[len(call.messages)] = answer
        context.messages = [*call.messages, message]
        context.parts.append(answer)
        context.token_ids.extend(turn.token_ids)
        context.is_busy = False
        return answer

    def _logprobs(self, turn: Turn) -> list[Message] | None:
        """The log-probabilities of a turn's tokens in OpenAI's form, if the engine reports them."""
        if turn.logprobs is None:
            return None
        texts = [decode(self._chat.tokenizer, [token]) for token in turn.token_ids]
        return [
            {"token": text, "logprob": each, "bytes": [*text.encode(errors="replace")], "top_logprobs": []}
            for text, each in zip(texts, turn.logprobs, strict=True)
        ]

    def _parsed(self, token_ids: Sequence[int], call: Call) -> Message:
        read, request = call.context.token_ids, call.request
        message = self._chat.parse([*call.opening, *token_ids], read[: len(read) - len(call.opening)], request.tools)
        if message.get("tool_calls") and not (request.tools and request.may_call):  # then it is text like any other
            text = self._chat.split_end(decode(self._chat.tokenizer, token_ids))[0]
            return {"role": "assistant", "content": text}
        return message

    # ---------------------------------------------------------------------------------------------------------------
    # Its context
    # ---------------------------------------------------------------------------------------------------------------

    def _continued(self, request: Request, messages: Sequence[Message]) -> Call | None:
        """The call in the longest context that the request continues, if there is one."""
        for context in sorted(self._contexts, key=lambda each: len(each.token_ids), reverse=True):
            restored = None if context.is_busy else context.follows(messages, request.tools)
            if restored is None:
                continue
            text = self._chat.render(restored, request.tools)
            place = context.end_in(text, self._chat)
            if place is not None:
                kind = EXTENDED if text.startswith(context.text) else SPLICED
                rest, token_ids = text[place:], self._chat.encode(text[place:])
                new = [self._observation(rest, token_ids, restored)] if token_ids else []
                return Call(request, context, kind, restored, new)
        return None

    def _begun(self, request: Request, messages: Sequence[Message]) -> Call:
        """The call in a new context, with thoughts restored that the client dropped."""
        cause = self._cause(messages, request.tools, self.answers)
        restored = all_restored(messages, self.answers)
        text = self._chat.render(restored, request.tools)
        token_ids = self._chat.encode(text)
        size, shown = self._shown_before(text, token_ids, restored, request.tools)
        new = [self._observation(text[:shown], token_ids[:size], (), repeats=True)] if size else []
        if token_ids[size:]:
            new.append(self._observation(text[shown:], token_ids[size:], restored))
        if self._most_contexts is not None:
            self._forget_oldest()
        kind = NEW_CONTEXT if self._contexts else FIRST
        context = Context(self._free_row(), request.tools)
        self._contexts.append(context)
        return Call(request, context, kind, restored, new, cause)

    def _cause(self, messages: Sequence[Message], tools: Sequence[Message], known: Sequence[Answer]) -> str | None:
        """Why a request with messages of the policy does not continue any context."""
        own = [message for message in messages if message["role"] == "assistant"]
        if not own or not known:
            return None
        if any(restored_message(each, known) is each for each in own):
            return "client"
        is_known = any(each.has_said(messages, tools) for each in self._contexts if not each.is_busy)
        return "template" if is_known else "history"

    def _shown_before(
        self, text: str, token_ids: Sequence[int], messages: Sequence[Message], tools: Sequence[Message]
    ) -> tuple[int, int]:
        """How many tokens and characters of a new context repeat earlier parts of the trajectory.

        These are all up to the policy's last message, or else a prefix shared with another context. The two counts
        differ slightly if a token crosses the border or encoding changes the text; this affects only displayed text.
        """
        if not self._contexts:
            return 0, 0
        if last := _after_last_turn(messages):
            shown = _common(text, self._beginning(messages[:last], tools))
            size = len(self._chat.encode(text[:shown]))
        else:
            size = max(_common(token_ids, each.token_ids) for each in self._contexts)
            shown = len(decode(self._chat.tokenizer, token_ids[:size])) if size else 0
        return (size, shown) if size < len(token_ids) else (len(token_ids), len(text))

    def _beginning(self, messages: Sequence[Message], tools: Sequence[Message]) -> str:
        """The messages rendered on their own, if the template can do so."""
        try:
            return self._chat.render(messages, tools, generation_prompt=False)
        except BadRequest:
            return ""

    def _observation(
        self, text: str, token_ids: Sequence[int], messages: Sequence[Message], repeats: bool = False
    ) -> Observation:
        """What the policy reads, with the tool results among the new `messages`."""
        tools = [each for each in messages[_after_last_turn(messages) :] if each["role"] == "tool"]
        calls = [call for each in self.answers for call in each.message.get("tool_calls") or ()]
        names = {call["id"]: call["function"]["name"] for call in calls}
        named = [str(each.get("name") or names.get(each.get("tool_call_id"), "")) for each in tools]
        results = tuple(ToolResult(name, each["content"]) for name, each in zip(named, tools, strict=True))
        return Observation(tuple(token_ids), text, role="tool" if tools else "user", results=results, repeats=repeats)

    def _free_row(self) -> int:
        """The trajectory's first row that no context uses."""
        taken = {context.row for context in self._contexts}
        return next(row for row in count(self._row, self._stride) if row not in taken)

    def _forget_oldest(self) -> None:
        """Make room for one more context within `most_contexts`, if one of them is not busy."""
        idle = [each for each in self._contexts if not each.is_busy]
        if idle and len(self._contexts) >= (self._most_contexts or 0):
            self._contexts.remove(idle[0])
            self.calls = [call for call in self.calls if call.context is not idle[0]]

    # ---------------------------------------------------------------------------------------------------------------
    # Results
    # ---------------------------------------------------------------------------------------------------------------

    @property
    def answers(self) -> list[Answer]:
        """In the order of their requests."""
        return [answer for _, answer in self._answered]

    @property
    def completion_length(self) -> int:
        """How many tokens follow the first prompt, including the limits of turns in progress.

        Repeated tokens do not count.
        """
        observed = (each for call in self.calls[1:] for each in call.observations if not each.repeats)
        written = sum(len(each.answer.turn.token_ids) if each.answer else each.limit for each in self.calls)
        return written + sum(len(each.token_ids) for each in observed)

    def completion(self) -> list[Message]:
        """The messages after the first prompt, each once: the policy's, and the new ones before each of them."""
        messages: list[Message] = []
        for call, answer in self._answered:
            messages += [*(call.new_messages if messages else ()), answer.message]
        return messages

    def trajectory(self, stop_reason: StopReason) -> Trajectory:
        """The answered calls. If there are none, the prompt is an end-of-sequence token."""
        if not self._answered:
            return Trajectory((int(self._chat.tokenizer.eos_token_id),), (), stop_reason)
        (first, _), numbers = self._answered[0], dict[Context, int]()
        segments: list[Turn | Observation] = []
        for call, answer in self._answered:
            number = numbers.setdefault(call.context, len(numbers))
            segments += [replace(each, context=number) for each in call.observations if call is not first]
            segments.append(replace(answer.turn, context=number))
        prompt = chain.from_iterable(each.token_ids for each in first.observations)
        return Trajectory(tuple(prompt), tuple(segments), stop_reason)

    @property
    def _answered(self) -> list[tuple[Call, Answer]]:
        return [(call, call.answer) for call in self.calls if call.answer is not None]


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The length of the common prefix of two sequences."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (left, right) in pairs if left != right), min(len(one), len(other)))


def _after_last_turn(messages: Sequence[Message]) -> int:
    """The index after the policy's last message; 0 if there is none."""
    return max((place for place, each in enumerate(messages, 1) if each["role"] == "assistant"), default=0)
