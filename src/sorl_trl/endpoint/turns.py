"""Turns for API calls: the endpoint's thread requests turns, and the trainer's thread polls the engine for them."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from sorl_trl.rollout import Engine, Generation
from sorl_trl.rollout.engines.base import check_generation

logger = logging.getLogger(__name__)

_CHECK_S = 0.5
"""How often a waiting trainer checks whether its run has ended, in seconds."""
_PATIENCE_S = 30.0
"""How long the others wait for a due agent; limited, because agents may wait for each other. Our choice."""


class RunEnded(Exception):
    """The trajectory, or the whole rollout, has ended."""


@dataclass(eq=False)
class TurnRequest:
    """A turn that an API call waits for."""

    run: int
    row: int
    token_ids: list[int]
    limit: int
    stops: tuple[str, ...] = ()
    schema: Mapping[str, Any] | None = None
    agent: str = ""
    generation: Future[Generation] = field(default_factory=Future)

    def settle(self, result: Generation | Exception) -> None:
        """Answer the request, unless no client waits any more."""
        with suppress(InvalidStateError):
            if isinstance(result, Generation):
                self.generation.set_result(result)
            else:
                self.generation.set_exception(result)


class TurnQueue:
    """The turns of one rollout of `runs` trajectories.

    An agent is due `rejoin_after` polls after it got its turn. Its next call is then submitted, even if it came sooner
    or must be waited for, unless the agent ends. Samples therefore depend neither on tools nor on the clock, as long
    as each agent makes one call at a time, abandons none, and takes less than 30 seconds between calls. An engine that
    generates whole turns waits for all agents, and one that does not count steps (a server) gets each call as it
    comes.

    Attributes:
        seconds_generating: How long the engine was polled.
        seconds_waiting: How long the engine was idle or waited for an agent.
    """

    def __init__(self, runs: int, rejoin_after: int) -> None:
        self.seconds_generating = self.seconds_waiting = 0.0
        self._rejoin_after = rejoin_after
        self._news = threading.Condition()
        """Guards what other threads change: the four lists below, and `_is_closed`."""
        self._asked: list[TurnRequest] = []
        self._withdrawn: list[TurnRequest] = []
        self._ended: list[int] = []
        self._failed: list[Exception] = []
        self._engine: Engine | None = None
        self._is_closed = False
        self._live = set(range(runs))
        self._due = dict.fromkeys(range(runs), 0)
        """By run, the poll from which to wait for an agent without a turn in progress."""
        self._held: dict[int, list[TurnRequest]] = {}
        """Requests that came before their agents were due, by run."""
        self._generating: dict[int, TurnRequest] = {}
        """The turns in progress, by row."""
        self._rows: defaultdict[int, set[int]] = defaultdict(set)
        self._polls = 0
        self._is_patient = True

    # ---------------------------------------------------------------------------------------------------------------
    # Other threads
    # ---------------------------------------------------------------------------------------------------------------

    def ask(self, request: TurnRequest) -> None:
        """Request a turn. Its future raises RunEnded if its trajectory or the rollout ends first."""
        self._tell(self._asked, request)

    def withdraw(self, request: TurnRequest) -> None:
        """Withdraw a request that no client waits for any more."""
        self._tell(self._withdrawn, request)

    def end(self, run: int) -> None:
        """End a trajectory: its agent makes no more calls."""
        self._tell(self._ended, run)

    def fail(self, error: Exception) -> None:
        """End the rollout: `serve` raises the error."""
        self._tell(self._failed, error)

    def _tell(self, queue: list[Any], item: Any) -> None:
        with self._news:
            if self._is_closed:
                if isinstance(item, TurnRequest):
                    item.settle(RunEnded("the rollout has ended"))
                return
            queue.append(item)
            self._news.notify()
            engine = self._engine
        if engine is not None and not engine.in_steps:
            engine.wake()

    # ---------------------------------------------------------------------------------------------------------------
    # The trainer's thread
    # ---------------------------------------------------------------------------------------------------------------

    def serve(self, engine: Engine, any_active: Callable[[bool], bool] = bool) -> None:
        """Generate turns until all trajectories have ended. Raises the engine's errors and those given to `fail`.

        If ranks depend on each other, each call of `any_active` is followed by one poll, as on every rank.
        """
        self._engine = engine
        if engine.in_turns:
            self._rejoin_after = 0
        try:
            while any_active(bool(self._live)):
                self._take_in(engine, any_active)
                if engine.idle and not engine.polls_together:
                    if self._live:
                        self._wait()
                    continue
                began = time.perf_counter()
                ended = engine.poll()
                self.seconds_generating += time.perf_counter() - began
                self._polls += 1
                for row, generation in ended:
                    self._answer(row, generation)
        finally:
            self._close()

    def _take_in(self, engine: Engine, any_active: Callable[[bool], bool]) -> None:
        """Submit the calls of all agents that are due, and wait for those that are late."""
        self._drain(engine)
        while engine.in_steps:
            self._wait_for_late(engine, any_active)
            if not engine.idle or not self._due or any(map(self._is_due, self._held)):
                break
            self._polls = min(self._due.values())  # nobody can continue before
        ready = [run for run in sorted(self._held) if self._is_due(run) or not engine.in_steps]
        requests = [each for run in ready for each in sorted(self._held.pop(run), key=lambda each: each.row)]
        for request in requests:
            self._due.pop(request.run, None)
            self._generating[request.row] = request
            self._rows[request.run].add(request.row)
        for request in requests:
            submit = engine.of_agent(request.agent).submit
            submit(request.row, request.token_ids, request.limit, request.stops, request.schema)

    def _wait_for_late(self, engine: Engine, any_active: Callable[[bool], bool]) -> None:
        began = time.perf_counter()
        while late := [run for run in self._due if self._is_due(run) and run not in self._held]:
            waited = time.perf_counter() - began
            if waited > (_PATIENCE_S if self._is_patient else 0.0) and (self._held or not engine.idle):
                self._warn_impatient(len(late), waited)
                for run in late:  # whose call is submitted when it comes
                    del self._due[run]
                continue
            self._wait()
            if not engine.polls_together:
                any_active(True)  # raises if the run has been ended
            self._drain(engine)

    def _warn_impatient(self, late: int, waited: float) -> None:
        if self._is_patient:
            logger.warning(
                "Agents made no call for %.0f s (%d of them), and the others continue: from now on, samples depend on "
                "timing. An agent may have a slow tool, wait for another agent, or block the shared event loop: an "
                "async agent needs an async client.",
                *(waited, late),
            )
        self._is_patient = False

    def _is_due(self, run: int) -> bool:
        return self._due.get(run, 0) <= self._polls

    def _wait(self) -> None:
        """Wait for changes from other threads, but not for long."""
        began = time.perf_counter()
        with self._news:
            if not (self._asked or self._withdrawn or self._ended or self._failed):
                self._news.wait(_CHECK_S)
        self.seconds_waiting += time.perf_counter() - began

    def _drain(self, engine: Engine) -> None:
        with self._news:
            asked, withdrawn, ended = [*self._asked], [*self._withdrawn], [*self._ended]
            if self._failed:
                raise self._failed[0]
            for taken in (self._asked, self._withdrawn, self._ended):  # not replaced: a thread may have hold of one
                taken.clear()
        for request in asked:
            self._held.setdefault(request.run, []).append(request)
        for request in withdrawn:
            if self._generating.get(request.row) is request:
                del self._generating[request.row]
                engine.release(request.row)
            elif request in self._held.get(request.run, ()):
                self._held[request.run].remove(request)
        for run in [run for run, held in self._held.items() if not held]:
            del self._held[run]
        for run in ended:
            self._end(run, engine)
        for run in [run for run in self._held if run not in self._live]:
            self._refuse(self._held.pop(run))

    def _end(self, run: int, engine: Engine) -> None:
        self._live.discard(run)
        self._due.pop(run, None)
        unfinished = [each for each in self._generating.values() if each.run == run]
        for request in unfinished:
            del self._generating[request.row]
        for row in sorted(self._rows.pop(run, ())):
            engine.release(row)
        self._refuse(unfinished)

    def _answer(self, row: int, generation: Generation) -> None:
        request = self._generating[row]
        check_generation(row, generation, request.limit)
        del self._generating[row]
        if request.run in self._live and not any(each.run == request.run for each in self._generating.values()):
            self._due[request.run] = self._polls + self._rejoin_after
        request.settle(generation)

    def _refuse(self, requests: list[TurnRequest]) -> None:
        for request in requests:
            request.settle(RunEnded("the trajectory has ended"))

    def _close(self) -> None:
        with self._news:
            self._is_closed = True
            waiting = [
                *self._asked,
                *self._generating.values(),
                *(each for held in self._held.values() for each in held),
            ]
        for request in waiting:
            request.settle(RunEnded("the rollout has ended"))
