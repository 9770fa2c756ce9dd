"""What answers the policy's turns: one environment per trajectory, or one responder for all."""

from __future__ import annotations

import copy
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, SupportsFloat

from sorl_trl.checks import POSITIVE_COUNT
from sorl_trl.rollout.protocol import TagProtocol
from sorl_trl.threads import DaemonThreads
from sorl_trl.types import Passage, StopReason, ToolResult, Trajectory, Turn

THREAD = "sorl-environment"
"""The name of the threads in which environments and searches are called."""
_STOPS = (StopReason.ENVIRONMENT_DONE, StopReason.ENVIRONMENT_UNAVAILABLE, StopReason.SEARCH_UNAVAILABLE)


@dataclass(frozen=True)
class Reply:
    """The environment's reply to a turn.

    `text` is untrusted: the rollout sanitizes it, cuts it to `max_observation_tokens` and frames it. A reply with a
    `stop` ends the trajectory, and its text is ignored.

    Raises TypeError if `text` is not a string, and ValueError if `reward` is not finite, `stop` is not a reason of the
    environment (`ENVIRONMENT_DONE`, or that it is down), or `role` is neither "tool" nor "user".
    """

    text: str = ""
    passages: tuple[Passage, ...] = ()
    """The passages that `text` shows, if any, for records and statistics."""
    reward: float | None = None
    """The reward of this turn (`Turn.reward`)."""
    stop: StopReason | None = None
    role: str = "tool"
    """The speaker. A "user" in the middle of a trajectory requires a `ChatProtocol`."""
    results: tuple[ToolResult, ...] = ()
    """What several tools return, instead of `text`: messages of a chat template with tools, for a `ChatProtocol`."""

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"text={self.text!r} must be a string")
        if self.role not in ("tool", "user"):
            raise ValueError(f"role={self.role!r} must be 'tool' or 'user'")
        if self.reward is not None and not (isinstance(self.reward, SupportsFloat) and math.isfinite(self.reward)):
            raise ValueError(f"reward={self.reward!r} must be a finite number")
        if self.stop is not None and self.stop not in _STOPS:
            raise ValueError(f"stop={self.stop!r} must be None or one of {[str(reason) for reason in _STOPS]}")


class Environment(Protocol):
    """The world of one trajectory. Every trajectory has its own object, so state is not shared.

    `step` may be a coroutine and may take long, because other trajectories continue meanwhile. It gets a turn with the
    action that the protocol parsed (`turn.action`). If the world is down, raise `SearchUnavailable`, `ConnectionError`
    or `TimeoutError`, or do not catch a client's error that one of them caused: the trajectory is then masked out of
    the loss. Any other exception is a programming error and ends the run.

    Two methods are optional. `reset` gets the dataset columns named by its parameters, and may return text for the end
    of the prompt. `measures` is called after the rollout, in the rollout's thread, and returns numbers by name, which
    are averaged over trajectories and logged. `EnvironmentResponder` makes one environment per trajectory.

    If several agents share the policy, the optional attribute `agent` names the agent that acts next: `reset` sets the
    first, and `step` the following ones.
    """

    def step(self, turn: Turn) -> Reply | Awaitable[Reply]:
        """Answer a turn that calls a tool, or any message. Answers and invalid turns are never passed."""
        ...


@dataclass(frozen=True)
class RowTurn:
    """A turn, and its row in the rollout."""

    row: int
    turn: Turn


class Responder(ABC):
    """Answers the turns of all rows of a rollout, while the engine continues.

    Attributes:
        environments: An object per row of the last rollout, for reward functions; may be empty.
        kinds: The name of each row's environment, if there are several.
        protocol: The protocol for the policy's actions, if it has its own.
        shown: Functions that the chat template shows as tools, for rows of each kind.
    """

    environments: Sequence[Any] = ()
    kinds: Sequence[str | None] = ()
    protocol: TagProtocol | None = None
    shown: Mapping[str | None, Sequence[Callable[..., Any]]] = MappingProxyType({})

    def fork(self) -> Responder:
        """A shallow copy for another rollout, which may run at the same time.

        `greet`, `open` and `close` must therefore assign new attributes instead of changing them in place.
        """
        return copy.copy(self)

    def greet(self, examples: Sequence[Mapping[str, Any]]) -> Sequence[str | None]:
        """The text to add to each row's prompt before it is encoded; `open` follows with the same examples.

        Like all environment text, it is untrusted, and the caller sanitizes it.
        """
        return [None] * len(examples)

    def open(self, examples: Sequence[Mapping[str, Any]]) -> None:
        """Begin a rollout, with one example per row: its `prompt` and the columns of the dataset."""

    def protocol_of(self, row: int, protocol: TagProtocol) -> TagProtocol:
        """The protocol for reading a row's turns, based on the rollout's, if rows have different tools."""
        return protocol

    def agent_of(self, row: int) -> str:
        """The agent that acts next in a row, "" if there is only one."""
        return ""

    def measures(self, row: int) -> Mapping[str, float]:
        """The measures of a row whose trajectory has ended, by name."""
        return {}

    @abstractmethod
    def ask(self, turns: Sequence[RowTurn]) -> list[Future[Reply]]:
        """Start answering turns, without waiting. The rollout never has two turns of a row open at the same time."""

    def close(self) -> None:
        """End the rollout, without waiting for pending answers."""


class BatchResponder(Responder):
    """Answers turns in batches, in threads. All turns that end while the threads are busy form one batch.

    Subclasses implement `respond`, which is called by up to `concurrency` threads at the same time.
    """

    def __init__(self, concurrency: int) -> None:
        POSITIVE_COUNT.check("concurrency", concurrency)
        self._threads = DaemonThreads(concurrency, THREAD)
        self._lock = threading.Lock()
        self._asked: list[tuple[RowTurn, Future[Reply]]] = []

    @abstractmethod
    def respond(self, turns: Sequence[RowTurn]) -> Sequence[Reply]:
        """Answer turns, in order."""

    def ask(self, turns: Sequence[RowTurn]) -> list[Future[Reply]]:
        asked = [(turn, Future[Reply]()) for turn in turns]
        with self._lock:
            self._asked = [*self._asked, *asked]  # a new list: a fork has the old one
        self._threads.submit(self._answer)
        return [reply for _, reply in asked]

    def close(self) -> None:
        """Drop turns that no thread has begun. Answers in progress continue, but are ignored.

        The threads live as long as the responder, because the objects that they call may be bound to them.
        """
        self._take()

    def _take(self) -> list[tuple[RowTurn, Future[Reply]]]:
        with self._lock:
            asked, self._asked = self._asked, []
        return asked

    def _answer(self) -> None:
        """Answer all turns asked since a thread was last free. Another thread may have taken them already."""
        asked = self._take()
        if not asked:
            return
        try:
            replies = self.respond([turn for turn, _ in asked])
            if len(replies) != len(asked):
                raise RuntimeError(f"{type(self).__name__} gave {len(replies)} replies to {len(asked)} turns")
        except BaseException as error:  # the rollout raises it where it waits for the reply
            for _, future in asked:
                future.set_exception(error)
            return
        for (_, future), reply in zip(asked, replies, strict=True):
            future.set_result(reply)


def environment_statistics(trajectories: Sequence[Trajectory], responder: Responder) -> dict[str, float]:
    """Means over trajectories of their environments' measures, for each kind of environment if there are several.

    They include the `reward` if the environment gives rewards and, with several kinds, the number of `turns`.
    Trajectories ended by an infrastructure failure are left out.
    """
    found: dict[str, list[float]] = {}
    for row, trajectory in enumerate(trajectories):
        if trajectory.stop_reason.is_infrastructure_failure:
            continue
        kind = responder.kinds[row] if responder.kinds else None
        rewards = [turn.reward for turn in trajectory.turns if turn.reward is not None]
        figures = dict(responder.measures(row)) | ({"reward": sum(rewards)} if rewards else {})
        if kind is not None:
            figures["turns"] = len(trajectory.turns)
        for name, value in figures.items():
            if value is not None:
                found.setdefault(name if kind is None else f"{kind}/{name}", []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}
