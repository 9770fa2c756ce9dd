"""Calls of tools that run in threads, or as tasks of an event loop, and are given up where they take too long."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

_THREAD = "sorl-tool"
_TO_END_S = 0.5
"""Ours: what a coroutine that is cancelled may take to end. Whatever it belongs to is busy if it has not."""


@dataclass(eq=False)
class ToolCall:
    """What the policy asked of a tool, and what came of it."""

    row: int
    """Of the rollout."""
    name: str
    function: Callable[[], Any] | None
    """Calls the tool; None where it is a coroutine."""
    coroutine: Coroutine[Any, Any, Any] | None = None
    owner: Any = None
    """What may not be called again before this call has ended, or None."""
    ended: Future[Any] = field(default_factory=Future)
    """Done when the tool has really returned, however late."""
    value: Any = None
    error: BaseException | None = None
    is_late: bool = False
    """Whether there was no answer in time: the call was given up, or not made beside one that was."""
    _task: asyncio.Task[Any] | None = None

    def make(self) -> None:
        """Call the tool, in whatever thread this is."""
        assert self.function is not None
        try:
            self.ended.set_result(self.function())
        except BaseException as error:  # KeyboardInterrupt too: whoever waits raises it
            self.ended.set_exception(error)

    def begin(self) -> None:
        """Start the coroutine. Called in its event loop."""
        self._task = asyncio.get_running_loop().create_task(self._contained())
        self._task.add_done_callback(self._has_ended)

    def cancel(self) -> None:
        """Ask the coroutine to end, or not to begin. Called in its event loop."""
        assert self.coroutine is not None
        if self._task is None:
            self.coroutine.close()
        else:
            self._task.cancel()

    def read(self) -> None:
        """Take over what the tool has answered, an exception too. Raises what is none, as KeyboardInterrupt."""
        try:
            self.value = self.ended.result()
        except Exception as error:
            self.error = error

    def give_up(self, why: str) -> None:
        """Answer in the place of the tool, which has not."""
        self.is_late = True
        self.error = TimeoutError(why)

    async def _contained(self) -> Any:
        """What the coroutine returned or raised: a task that raises KeyboardInterrupt would end the event loop."""
        assert self.coroutine is not None
        try:
            return await self.coroutine, None
        except asyncio.CancelledError as error:  # TRL takes one for what the tool returned
            return error, None
        except BaseException as error:
            return None, error

    def _has_ended(self, task: asyncio.Task[Any]) -> None:
        assert self.coroutine is not None
        self.coroutine.close()  # one that was cancelled before it began would warn that nobody awaited it
        value, error = (None, None) if task.cancelled() else task.result()
        if error is None:
            self.ended.set_result(value)
        else:
            self.ended.set_exception(error)


Chain: TypeAlias = "list[list[ToolCall]]"
"""The calls of some messages, which are made in order."""


class HangingCalls:
    """The calls that were given up and still go on, from one rollout to the next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: list[ToolCall] = []

    def add(self, call: ToolCall) -> None:
        with self._lock:
            self._calls = [each for each in self._calls if not each.ended.done()] + [call]

    def holds(self, owner: Any) -> bool:
        """Whether such a call is still busy with this very object."""
        return owner is not None and any(each.owner is owner and not each.ended.done() for each in self._calls)


class ToolRunner:
    """Runs calls: those of one chain one after the other, in up to `concurrency` chains at the same time.

    The threads are daemons. Without a timeout, a chain's thread makes its calls itself. With one, each call has a
    thread of its own, which is left to itself when the time is up: the chain goes on.

    Args:
        concurrency: chains at the same time.
        timeout_s: how long a call may take; None waits for ever.
        hanging: where calls that are given up are kept.
        event_loop: gives the loop in which coroutines run.
    """

    def __init__(
        self, concurrency: int, timeout_s: float | None, hanging: HangingCalls, event_loop: Callable[[], Any]
    ) -> None:
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._hanging = hanging
        self._event_loop = event_loop
        self._is_stopped = False
        self._interruption: Future[None] = Future()
        """What ends the rollout: a tool has raised KeyboardInterrupt, or there is no thread left to have."""

    def start(self, chains: Iterable[Chain]) -> list[Future[None]]:
        """Start running chains, without waiting. Each chain's future is done when all of its calls are."""
        waiting: queue.SimpleQueue[tuple[Chain, Future[None]]] = queue.SimpleQueue()
        ends: list[Future[None]] = []
        for chain in chains:
            ends.append(Future())
            waiting.put((chain, ends[-1]))
        for _ in range(min(self._concurrency, len(ends))):
            threading.Thread(target=self._work, args=(waiting,), name=_THREAD, daemon=True).start()
        return ends

    def join(self, end: Future[None]) -> None:
        """Wait for a chain. Raises what ends the rollout, whatever chain it comes from."""
        wait([end, self._interruption], return_when=FIRST_COMPLETED)
        if self._interruption.done():
            self._interruption.result()

    def stop(self) -> None:
        """Begin no further call. Those under way are left to themselves."""
        self._is_stopped = True

    def _work(self, waiting: queue.SimpleQueue[tuple[Chain, Future[None]]]) -> None:
        try:
            while not self._is_stopped:
                chain, end = waiting.get_nowait()
                for calls in chain:
                    self._run(calls)
                end.set_result(None)
        except queue.Empty:
            return
        except BaseException as error:
            self.stop()
            with suppress(InvalidStateError):  # another chain has ended the rollout
                self._interruption.set_exception(error)

    def _run(self, calls: Sequence[ToolCall]) -> None:
        """The calls of one message as TRL makes them: one after the other, then its coroutines together."""
        for call in calls:
            if call.function is not None and not self._is_stopped and self._is_free(call):
                self._make(call)
        coroutines = [call for call in calls if call.coroutine is not None and self._is_free(call)]
        if coroutines and not self._is_stopped:
            self._await(coroutines)

    def _is_free(self, call: ToolCall) -> bool:
        is_busy = self._hanging.holds(call.owner)
        if is_busy:
            call.give_up(f"Tool {call.name} was not called: an earlier call, which timed out, is still running.")
            if call.coroutine is not None:
                call.coroutine.close()
        return not is_busy

    def _make(self, call: ToolCall) -> None:
        if self._timeout_s is None:
            call.make()
        else:
            threading.Thread(target=call.make, name=_THREAD, daemon=True).start()
        self._wait_for([call])

    def _await(self, calls: Sequence[ToolCall]) -> None:
        event_loop = self._event_loop()
        for call in calls:
            event_loop.call_soon_threadsafe(call.begin)
        late = self._wait_for(calls)
        for call in late:
            event_loop.call_soon_threadsafe(call.cancel)
        wait([call.ended for call in late], _TO_END_S)

    def _wait_for(self, calls: Sequence[ToolCall]) -> list[ToolCall]:
        """Read the answers. Calls without one in time are given up, and returned.

        Raises what a tool raised if it is no `Exception`, as KeyboardInterrupt.
        """
        answered, _ = wait([call.ended for call in calls], self._timeout_s)
        late = [call for call in calls if call.ended not in answered]
        for call in late:
            self._hanging.add(call)
            call.give_up(f"Tool {call.name} timed out after {self._timeout_s:g} seconds.")
        for call in calls:
            if call.ended in answered:
                call.read()
        return late
