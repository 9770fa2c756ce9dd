"""A trajectory at the endpoint: its key, its conversation, its limits, and the turns that its requests wait for."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from sorl_trl.endpoint.agents import AgentMistake, retrieve
from sorl_trl.endpoint.contexts import Answer
from sorl_trl.endpoint.conversation import Call, Conversation
from sorl_trl.endpoint.requests import BadRequest
from sorl_trl.rollout.turns import ApiTurns, RunEnded
from sorl_trl.types import StopReason

logger = logging.getLogger(__name__)

KEY = "sorl-"
"""How the keys of trajectories begin."""
_GRACE_S = 5.0
"""How long an abandoned or undelivered turn is kept in case its request is sent again. Our choice."""
_LIMITED_BY = {
    StopReason.TRAJECTORY_LIMIT: "`max_completion_length` limits everything after the trajectory's first prompt",
    StopReason.CONTEXT_LIMIT: "the maximum context length is set by the model or by the memory for its KV cache",
}


@dataclass(frozen=True)
class CallLimits:
    """The most tokens of a turn, of a trajectory after its first prompt, and of a context."""

    turn: int
    trajectory: int | None
    window: int | None


@dataclass(eq=False)
class Run:
    """One trajectory: an API key, and the conversation under it."""

    number: int
    conversation: Conversation
    turns: ApiTurns
    limits: CallLimits
    constrains: bool = False
    """Whether the engine constrains turns to a JSON schema."""
    stop: Callable[[Exception], None] = lambda error: None
    """Called with the agent's mistake or the endpoint's failure. By default, only the agent is told."""
    warned: set[str] = field(default_factory=set)
    """Ignored fields that a warning has been logged for."""
    key: str = field(default_factory=lambda: f"{KEY}{secrets.token_hex(16)}")
    has_ended: bool = False
    resent: int = 0
    """How many repeated requests got the turn of the first one."""
    limit_reached: StopReason | None = None
    """Which limit left no room for the last turn."""
    turns_of: dict[bytes, list[SharedTurn]] = field(default_factory=dict)
    """The turns of each request, because a client may send one again."""

    def refuse(self, refusal: BadRequest) -> None:
        """Stop at an unsupported request, unless a template rejected what the policy wrote."""
        if refusal.code != "chat_template":
            self.fail(AgentMistake(f"The endpoint refused a request of the agent: {refusal}."), refusal)

    def fail(self, failure: Exception, cause: Exception) -> None:
        failure.__cause__ = cause
        self.stop(failure)

    def end(self) -> None:
        """End the run: the agent makes no more calls."""
        self.has_ended = True
        self.turns.end(self.number)


def room_for(run: Run, call: Call, sharing: int) -> int:
    """The most tokens for a call's turn. Raises BadRequest if there is no room.

    Its text begins as OpenAI's, by which LiteLLM and others recognize it.
    """
    limits, read = run.limits, len(call.context.token_ids)
    room = {StopReason.TURN_LIMIT: limits.turn}
    if limits.trajectory is not None:
        room[StopReason.TRAJECTORY_LIMIT] = (limits.trajectory - run.conversation.completion_length) // sharing
    if limits.window is not None:
        room[StopReason.CONTEXT_LIMIT] = limits.window - read
    reason, least = min(room.items(), key=lambda item: item[1])
    if least < 1:
        run.limit_reached = reason
        raise BadRequest(
            f"This model's maximum context length is {max(read + least, 0)} tokens. However, your messages resulted "
            f"in {read} tokens, which leaves {least} for an answer: {_LIMITED_BY[reason]}. Please reduce the length "
            "of the messages.",
            "messages",
            "context_length_exceeded",
        )
    run.limit_reached = None  # the agent has made room, if there was none
    return min(least, call.request.limit or least)


def warn_of_ignored(run: Run, call: Call, lacks_schema: bool, lacks_logprobs: bool) -> None:
    """Warn once per field that it has no effect."""
    found = {**call.request.without_effect}
    if lacks_schema:
        found["response_format"] = "only vLLM constrains turns to a schema, and only turns that cannot call tools"
    if lacks_logprobs:
        found["logprobs"] = "the engine reports none"
    if call.request.must_call and not call.opening:
        found["tool_choice"] = "a policy that thinks first, or whose template shows no call, cannot be forced to call"
    for name in found.keys() - run.warned:
        run.warned.add(name)
        logger.warning("An agent sets `%s`, which has no effect: %s.", name, found[name])


class SharedTurn:
    """A turn that several requests may wait for. It is dropped some seconds after the last one stops waiting."""

    def __init__(self, turn: Coroutine[Any, Any, Call], conversation: Conversation) -> None:
        self.task = asyncio.ensure_future(turn)
        self.task.add_done_callback(retrieve)
        self.is_received = self.is_dropped = False
        self.waiting = 0
        self._conversation = conversation
        self._timer: asyncio.TimerHandle | None = None

    @property
    def has_failed(self) -> bool:
        return self.is_dropped or (self.task.done() and (self.task.cancelled() or self.task.exception() is not None))

    def join(self) -> None:
        """Wait for the turn, until `leave`."""
        self.waiting += 1
        if self._timer is not None:
            self._timer.cancel()

    def leave(self) -> None:
        self.waiting -= 1
        if not self.waiting:
            self._timer = asyncio.get_running_loop().call_later(_GRACE_S, self.drop)

    def drop(self) -> None:
        """Drop the turn, and its tokens from the conversation, unless it was delivered."""
        if self.is_received or self.is_dropped:
            return
        if self.task.done() and not self.has_failed:
            self._conversation.cancel(self.task.result())
        self.is_dropped = True
        self.task.cancel()


async def all_answers(turns: Sequence[SharedTurn]) -> list[Answer]:
    """The answers of a request's turns. If one fails, the client gets none."""
    try:
        calls = [await asyncio.shield(turn.task) for turn in turns]
    except asyncio.CancelledError as error:
        if any(turn.task.cancelled() for turn in turns):
            raise RunEnded("this trajectory has ended") from error
        raise
    finally:
        for turn in turns:
            turn.leave()
    for turn in turns:
        turn.is_received = True  # or another request would take it up before it is sent
    return [call.answer for call in calls if call.answer is not None]
