"""The schedule of a rollout's turns: who generates, who is away for a reply, and when each goes on."""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter, itemgetter
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

from sorl_trl.rollout.engines.base import Engine, Generation, TurnRequest, check_generation
from sorl_trl.rollout.environment import Responder
from sorl_trl.rollout.progress import Progress
from sorl_trl.types import StopReason, Turn

logger = logging.getLogger(__name__)

_CHECK_S = 0.5
"""How often a waiting rollout checks whether its run has ended, in seconds."""


class RunEnded(Exception):
    """A trajectory has ended, and takes no more turns."""


@dataclass(eq=False)
class ApiRequest(TurnRequest):
    """A turn that an API call waits for."""

    generation: Future[Generation] = field(default_factory=Future)

    def settle(self, result: Generation | Exception) -> None:
        """Answer the call, unless no client waits any more."""
        with suppress(InvalidStateError):
            if isinstance(result, Generation):
                self.generation.set_result(result)
            else:
                self.generation.set_exception(result)


_Request = TypeVar("_Request", bound=TurnRequest)
Episode: TypeAlias = Generator[TurnRequest | Turn, Any, StopReason]
"""Plays a trajectory: it yields a request to get its generation, and a turn to get the environment's reply."""


class Turns(ABC, Generic[_Request]):
    """The turns of one rollout of `runs` trajectories. The trainer's thread owns them and the engine.

    After a turn, a trajectory is away: in its environment, or in an agent's code. It is due `rejoin_after` polls
    later. What comes for it sooner is held until then, and if nothing has come by then, all wait for it. If no row is
    generating, the next one is due at once. Samples therefore do not depend on how long replies take, not even through
    rounding. Two kinds of engine differ: with one that generates whole turns, all wait for all, and with one that does
    not count steps (a server), each goes on with whatever comes.
    """

    def __init__(self, engine: Engine, runs: int, rejoin_after: int) -> None:
        self._seconds_generating = self._seconds_waiting = 0.0
        self._began, self._sampled = time.perf_counter(), 0
        self._engine, self._runs = engine, runs
        self._rejoin_after = 0 if engine.in_turns else rejoin_after
        self._polls = 0
        self._news: SimpleQueue[tuple[Callable[[Any], None], Any]] = SimpleQueue()
        """What other threads want done here: functions with their arguments."""
        self._live = set(range(runs))
        self._generating: dict[int, _Request] = {}
        """The turns in progress, by row."""
        self._rows: defaultdict[int, set[int]] = defaultdict(set)
        """The rows that a trajectory has used."""
        self._due = dict.fromkeys(range(runs), 0)
        """The poll from which to wait for a trajectory that is away."""
        self._held: dict[int, list[Any]] = {}
        """What has come for a trajectory that does not go on yet."""

    @abstractmethod
    def _go_on(self, run: int) -> None:
        """Submit a trajectory's next turns, or end it, given what is held for it."""

    @abstractmethod
    def _answer(self, request: _Request, generation: Generation) -> None:
        """Pass on a turn that was sampled."""

    def serve(self, any_active: Callable[[bool], bool] = bool, progress: Progress | None = None) -> None:
        """Generate turns until all trajectories have ended. Raises the errors of the engine and of what goes on.

        If ranks depend on each other, each call of `any_active` is followed by one poll, as on every rank.
        """
        engine = self._engine
        self._rejoin(any_active)
        while any_active(bool(self._live)):
            if engine.idle and not engine.polls_together:
                self._take_news(_CHECK_S)
            else:
                self._poll()
            self._rejoin(any_active)
            if progress is not None:
                progress(self._runs - len(self._live), self.time_spent()["tokens_per_second"])

    def time_spent(self) -> dict[str, float]:
        """Seconds spent polling the engine and waiting, and sampled tokens per second since the rollout began."""
        return {
            "seconds_generating": self._seconds_generating,
            "seconds_waiting": self._seconds_waiting,
            "tokens_per_second": self._sampled / (time.perf_counter() - self._began),
        }

    def _poll(self) -> None:
        began = time.perf_counter()
        ended = self._engine.poll()
        self._seconds_generating += time.perf_counter() - began
        self._polls += 1
        for row, generation in sorted(ended, key=itemgetter(0)):
            request = self._generating[row]
            check_generation(row, generation, request.limit)
            self._sampled += len(generation.token_ids)
            del self._generating[row]
            self._answer(request, generation)
        if self._generating and self._engine.idle:
            raise RuntimeError(f"the engine is idle, but has not returned the turns of rows {[*self._generating]}")

    def _rejoin(self, any_active: Callable[[bool], bool]) -> None:
        """Let the trajectories that are due go on, and wait for those that are late."""
        engine = self._engine
        self._take_news()
        while True:
            if engine.in_steps:
                self._wait_for_late(any_active)
            now = self._polls if engine.in_steps else math.inf
            for run in [run for run in sorted(self._held) if self._due.get(run, 0) <= now]:
                self._go_on(run)
            if not (self._due and engine.idle and engine.in_steps):
                return
            self._polls = max(self._polls, min(self._due.values()))  # nobody can go on before

    def _wait_for_late(self, any_active: Callable[[bool], bool]) -> None:
        began = time.perf_counter()
        while late := [run for run, due in self._due.items() if due <= self._polls and run not in self._held]:
            if self._gives_up(late, time.perf_counter() - began):
                return
            self._take_news(_CHECK_S)
            if not self._engine.polls_together:
                any_active(True)  # raises if the run has been ended

    def _gives_up(self, late: Sequence[int], waited_s: float) -> bool:
        """Whether the others go on without these trajectories, for which they have waited so long."""
        return False

    def _submit(self, request: _Request) -> None:
        self._due.pop(request.run, None)
        self._generating[request.row] = request
        self._rows[request.run].add(request.row)
        self._engine.submit(request)

    def _leave(self, run: int) -> None:
        self._due[run] = self._polls + self._rejoin_after

    def _end(self, run: int) -> None:
        self._live.discard(run)
        self._due.pop(run, None)
        for row in sorted(self._rows.pop(run, ())):
            self._engine.release(row)

    def _tell(self, change: Callable[[Any], None], item: Any) -> None:
        """Have the trainer's thread call `change(item)`. For other threads, which change nothing themselves."""
        self._news.put((change, item))
        if not self._engine.in_steps:
            self._engine.wake()

    def _take_news(self, wait_s: float = 0.0) -> None:
        """Do what other threads want done. If that is nothing, wait for it first."""
        began = time.perf_counter()
        with suppress(Empty):
            change, item = self._news.get(timeout=wait_s)
            while True:
                change(item)
                change, item = self._news.get_nowait()
        self._seconds_waiting += time.perf_counter() - began if wait_s else 0.0


class Episodes(Turns[TurnRequest]):
    """The turns of `episodes`, by row. The responder gets all turns that end in one poll at once."""

    def __init__(self, engine: Engine, episodes: Sequence[Episode], responder: Responder, rejoin_after: int) -> None:
        super().__init__(engine, len(episodes), rejoin_after)
        self._episodes, self._responder = episodes, responder
        self._asking: dict[int, Turn] = {}
        self._held = {row: [None] for row in range(len(episodes))}  # they begin
        self.stop_reasons: dict[int, StopReason] = {}
        """Those of the episodes that have ended, by row."""

    def _go_on(self, run: int) -> None:
        (reply,) = self._held.pop(run)
        self._advance(run, reply and reply.result())

    def _answer(self, request: TurnRequest, generation: Generation) -> None:
        self._advance(request.run, generation)

    def _advance(self, run: int, value: Any) -> None:
        """Pass on what an episode has waited for, and take what it wants next."""
        try:
            wanted = self._episodes[run].send(value)
        except StopIteration as end:
            self.stop_reasons[run] = end.value
            self._end(run)
            return
        if isinstance(wanted, TurnRequest):
            self._submit(wanted)
        else:
            self._asking[run] = wanted

    def _poll(self) -> None:
        super()._poll()
        asking, self._asking = self._asking, {}
        replies = self._responder.ask(asking) if asking else {}
        if replies.keys() != asking.keys():
            raise RuntimeError(f"`ask` returned replies to rows {[*replies]}, but was asked for rows {[*asking]}")
        for row, reply in replies.items():
            self._leave(row)
            reply.add_done_callback(partial(self._tell, partial(self._hold, row)))

    def _hold(self, run: int, reply: Any) -> None:
        self._held[run] = [reply]


class ApiTurns(Turns[ApiRequest]):
    """Turns of API calls, which agents in other threads make: several at a time, each in a context of its own.

    Samples depend neither on agents' tools nor on the clock as long as each agent makes one call at a time, abandons
    none, and takes less than 30 seconds between calls.
    """

    patience_s = 30.0
    """How long the others wait for a late agent, as agents may wait for each other: our choice. 0 after the first."""

    def ask(self, request: ApiRequest) -> None:
        """Request a turn. Its future raises RunEnded if its trajectory ends first, and waits if the rollout does."""
        self._tell(self._hold, request)

    def withdraw(self, request: ApiRequest) -> None:
        """Withdraw a request that no client waits for any more."""
        self._tell(self._withdraw, request)

    def end(self, run: int) -> None:
        """End a trajectory: its agent makes no more calls."""
        self._tell(self._end, run)

    def fail(self, error: Exception) -> None:
        """End the rollout: `serve` raises the error."""
        self._tell(_raised, error)

    def _hold(self, request: ApiRequest) -> None:
        if request.run in self._live:
            self._held.setdefault(request.run, []).append(request)
        else:
            request.settle(RunEnded("the trajectory has ended"))

    def _withdraw(self, request: ApiRequest) -> None:
        held = self._held.get(request.run, [])
        if self._generating.get(request.row) is request:
            del self._generating[request.row]
            self._engine.release(request.row)
        elif request in held:
            held.remove(request)
            if not held:
                del self._held[request.run]

    def _gives_up(self, late: Sequence[int], waited_s: float) -> bool:
        """From now on, what comes for these trajectories is submitted when it comes."""
        if waited_s <= self.patience_s or (self._engine.idle and not self._held):
            return False
        if self.patience_s:
            logger.warning(
                "Agents made no call for %.0f s (%d of them), and the others continue: from now on, samples depend on "
                "timing. An agent may have a slow tool, wait for another agent, or block the shared event loop: an "
                "async agent needs an async client.",
                *(waited_s, len(late)),
            )
        self.patience_s = 0.0
        for run in late:
            del self._due[run]
        return True

    def _go_on(self, run: int) -> None:
        for request in sorted(self._held[run], key=attrgetter("row")):
            self._submit(request)
        del self._held[run]

    def _answer(self, request: ApiRequest, generation: Generation) -> None:
        if not any(row in self._generating for row in self._rows[request.run]):
            self._leave(request.run)
        request.settle(generation)

    def _end(self, run: int) -> None:
        rows = [row for row in self._rows[run] if row in self._generating]
        for request in [*self._held.pop(run, ()), *map(self._generating.pop, rows)]:
            request.settle(RunEnded("the trajectory has ended"))
        super()._end(run)


def _raised(error: Exception) -> None:
    raise error
