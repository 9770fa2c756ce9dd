"""What answers the policy's turns: an environment for each trajectory, or one responder for all."""

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
from sorl_trl.rollout.environments.calls import THREAD
from sorl_trl.rollout.protocol import TagProtocol
from sorl_trl.threads import DaemonThreads
from sorl_trl.types import Passage, StopReason, ToolResult, Turn

_STOPS = (StopReason.ENVIRONMENT_DONE, StopReason.ENVIRONMENT_UNAVAILABLE, StopReason.SEARCH_UNAVAILABLE)


@dataclass(frozen=True)
class Reply:
    """What the environment says to a turn.

    `text` is untrusted: the rollout sanitizes it, cuts it to `max_observation_tokens` and frames it. A reply with a
    `stop` ends the trajectory there, and its text is not read any more.

    Raises TypeError for a `text` that is none, ValueError for a `reward` that is not finite, a `stop` that is not the
    environment's to say (`ENVIRONMENT_DONE`, or that it is down), and a `role` that is neither "tool" nor "user".
    """

    text: str = ""
    passages: tuple[Passage, ...] = ()
    """What `text` shows, where it shows passages: for records and statistics."""
    reward: float | None = None
    """For this turn: see `Turn.reward`."""
    stop: StopReason | None = None
    role: str = "tool"
    """Who speaks. A "user" who speaks again, in the middle of the trajectory, needs a `ChatProtocol`."""
    results: tuple[ToolResult, ...] = ()
    """In place of `text`: what several tools say, with a `ChatProtocol` a message of the chat template each."""

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
    """The world of one trajectory. Its state is its own: every trajectory has another object.

    `step` may be a coroutine, and may take its time: other trajectories go on meanwhile. A turn comes in with what the
    protocol has read in it (`turn.action`). Raise `SearchUnavailable`, `ConnectionError` or `TimeoutError`, or what
    requests, httpx, aiohttp or urllib raises in their place, for a world that is down: the trajectory is masked out of
    the loss. Any other exception is a programming error and ends the run. A method `reset`, if there is one, is given
    the columns of the row's example that it takes, and may return text for the end of the prompt. A method `measures`,
    if there is one, is called after the rollout, in the rollout's thread, and returns figures of the trajectory by
    name, which are averaged and logged. `EnvironmentResponder` makes one environment per trajectory.
    """

    def step(self, turn: Turn) -> Reply | Awaitable[Reply]:
        """Answer a turn that calls a tool, or any message. Answers and invalid turns never come here."""
        ...


@dataclass(frozen=True)
class RowTurn:
    """A turn, and the row of the rollout that took it."""

    row: int
    turn: Turn


class Responder(ABC):
    """Answers the turns of all rows of a rollout, while the engine goes on.

    Attributes:
        environments: An object per row of the last rollout, for reward functions; empty where there are none.
        kinds: The name of each row's environment, where there are several.
        protocol: How a policy calls it, where it says so itself.
        shown: Functions that the chat template shows as tools, for rows of each of the `kinds`.
    """

    environments: Sequence[Any] = ()
    kinds: Sequence[str | None] = ()
    protocol: TagProtocol | None = None
    shown: Mapping[str | None, Sequence[Callable[..., Any]]] = MappingProxyType({})

    def fork(self) -> Responder:
        """One for another rollout, which may go on at the same time: a shallow copy, that shares what is not its own.

        What `greet`, `open` and `close` change must be assigned anew in them, not changed in place.
        """
        return copy.copy(self)

    def greet(self, examples: Sequence[Mapping[str, Any]]) -> Sequence[str | None]:
        """Say what is added to each row's prompt, before prompts are encoded; `open` follows with the same examples.

        Like all that an environment says, it is untrusted: whoever adds it sanitizes it.
        """
        return [None] * len(examples)

    def open(self, examples: Sequence[Mapping[str, Any]]) -> None:
        """Begin a rollout; one example per row says what is known of it: its `prompt`, the columns of the dataset."""

    def measures(self, row: int) -> Mapping[str, float]:
        """Figures of a row whose trajectory has ended, by name."""
        return {}

    @abstractmethod
    def ask(self, turns: Sequence[RowTurn]) -> list[Future[Reply]]:
        """Start answering, without waiting. The rollout never asks for a row twice at the same time."""

    def close(self) -> None:
        """End the rollout: whatever is still being answered is not waited for."""


class BatchResponder(Responder):
    """Answers turns in batches, in threads: all that have ended while the threads were busy are one batch.

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
        """Drop what no thread has begun with. What is being answered goes on, and nobody hears it.

        The threads stay for the next rollout, as long as the responder does: what they call may be bound to them.
        """
        self._take()

    def _take(self) -> list[tuple[RowTurn, Future[Reply]]]:
        with self._lock:
            asked, self._asked = self._asked, []
        return asked

    def _answer(self) -> None:
        """Whatever has been asked since a thread was free: nothing, where another one has taken it."""
        asked = self._take()
        if not asked:
            return
        try:
            replies = self.respond([turn for turn, _ in asked])
            if len(replies) != len(asked):
                raise RuntimeError(f"{type(self).__name__} gave {len(replies)} replies to {len(asked)} turns")
        except BaseException as error:  # whatever it is, the rollout raises it where it waits for the reply
            for _, future in asked:
                future.set_exception(error)
            return
        for (_, future), reply in zip(asked, replies, strict=True):
            future.set_result(reply)
