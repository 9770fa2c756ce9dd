"""What tools answer in TRL's tool loop: one call after another as TRL makes them, or those of all rows together."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Hashable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, TypeAlias

from accelerate.logging import get_logger

from sorl_trl.search import SearchUnavailable
from sorl_trl.trainers.agents.tool_calls import Chain, HangingCalls, ToolCall, ToolRunner

logger = get_logger(__name__)

Tools: TypeAlias = "dict[str, Callable[..., Any]]"
"""By their names."""
_WORTH_SAYING_S = 5.0
"""Ours: so long must a rollout have waited for tools, and half of its tool loop, before there is advice about it."""


class ToolAnswers(ABC):
    """The tools of one rollout, as TRL's loop is given them, and what comes of its calls."""

    def __init__(self) -> None:
        self.failures = 0
        """Of those that TRL does not know of."""
        self.late = 0
        """Calls without an answer in time."""
        self.unavailable: set[int] = set()
        """The rows in which a search engine was down."""

    @abstractmethod
    def wrapped(self, row: int, sync_tools: Tools, async_tools: Tools) -> tuple[Tools, Tools]:
        """The tools to give to TRL's loop in the place of a row's own."""

    @abstractmethod
    def settle(self, messages: list[dict[str, Any]]) -> None:
        """Put into a row's messages what its tools have said, as TRL would have done when it made the calls."""

    def check(self) -> None:
        """Raise RuntimeError if a message has been left without what its tool said."""

    def advice(self) -> str | None:
        """What to tell a user whose rollouts wait for tools; None where they do not."""
        return None

    def close(self) -> None:
        """End the rollout: no further call is begun."""


def tool_answers(trainer: Any, hanging: HangingCalls) -> ToolAnswers:
    """For one rollout, by the trainer's `tool_concurrency` and `tool_timeout_s`.

    TRL looks for images in what a tool has returned before anybody asks for it: with a vision model, calls are made
    as TRL makes them.
    """
    args = trainer.args
    if trainer._is_vlm or (True):
        return SerialAnswers()
    return ConcurrentAnswers(trainer, hanging)


class SerialAnswers(ToolAnswers):
    """TRL's way: each call is made, in the thread of the trainer, before the next."""

    def __init__(self) -> None:
        super().__init__()
        self._began_at = time.perf_counter()
        self._seconds = 0.0
        self._under_way = 0

    def wrapped(self, row: int, sync_tools: Tools, async_tools: Tools) -> tuple[Tools, Tools]:
        """See `ToolAnswers`: the same tools, which also report that their search engine is unavailable."""
        report = partial(self.unavailable.add, row)
        return (
            {name: self._reporting(tool, report) for name, tool in sync_tools.items()},
            {name: self._reporting_later(tool, report) for name, tool in async_tools.items()},
        )

    def settle(self, messages: list[dict[str, Any]]) -> None:
        """TRL has done it."""

    def advice(self) -> str | None:
        """See `ToolAnswers`."""
        seconds = time.perf_counter() - self._began_at
        if self._seconds < max(_WORTH_SAYING_S, seconds / 2):
            return None
        return (
            f"{self._seconds:.0f} of {seconds:.0f} seconds of a tool loop went into tools, one call after another. "
            "Where they are safe to call from several threads, set `tool_concurrency` above 1."
        )

    def _reporting(self, tool: Callable[..., Any], report: Callable[[], None]) -> Callable[..., Any]:
        @wraps(tool)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._observed(report):
                return tool(*args, **kwargs)

        return call

    def _reporting_later(self, tool: Callable[..., Any], report: Callable[[], None]) -> Callable[..., Any]:
        async def awaited(answer: Coroutine[Any, Any, Any]) -> Any:
            with self._observed(report):
                return await answer

        @wraps(tool)
        def call(*args: Any, **kwargs: Any) -> Any:
            return awaited(tool(*args, **kwargs))  # arguments that do not fit are an error here, as without us

        return call

    @contextmanager
    def _observed(self, report: Callable[[], None]) -> Iterator[None]:
        """Count the time of a call, and that of coroutines which TRL awaits together once."""
        began_at = time.perf_counter()
        self._under_way += 1
        try:
            yield
        except SearchUnavailable:
            report()
            raise
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._seconds += time.perf_counter() - began_at


class Placeholder(str):
    """Stands in a message until its call is answered. `str()` gives it back, so that TRL puts it there."""

    call: ToolCall

    def __str__(self) -> str:
        return self


class ConcurrentAnswers(ToolAnswers):
    """All rows' calls of one iteration run together, and each message gets what its own call has said.

    TRL's loop calls the tools of all rows and only then asks for the tokens of what they say, row by row. So a call is
    noted, and answered with a `Placeholder`; the first question for tokens starts all that were noted, and each waits
    for its row. Calls of one row, and of rows that share an environment, are made in the order in which TRL makes
    them, one after the other. Messages have TRL's order and TRL's words.
    """

    def __init__(self, trainer: Any, hanging: HangingCalls) -> None:
        super().__init__()
        args = trainer.args
        self._environments = trainer.environments
        self._is_shared = 1 > 1
        self._event_loop: Callable[[], Any] = lambda: trainer.async_loop
        self._runner = ToolRunner(1, None, hanging, self._event_loop)
        self._noted: list[ToolCall] = []
        self._coroutines: list[ToolCall] = []
        self._chain_of: dict[int, Future[None]] = {}
        """Row -> the end of its calls."""
        self._unanswered = 0

    def wrapped(self, row: int, sync_tools: Tools, async_tools: Tools) -> tuple[Tools, Tools]:
        """See `ToolAnswers`. None is a coroutine: TRL would wait for those of a row before it calls the next row's."""
        at_once = {name: self._noting(row, name, tool) for name, tool in sync_tools.items()}
        later = {name: self._noting_coroutine(row, name, tool) for name, tool in async_tools.items()}
        return {**later, **at_once}, {}

    def settle(self, messages: list[dict[str, Any]]) -> None:
        """See `ToolAnswers`: it waits for the row's calls. Raises what no message can be made of."""
        pending = [message["content"].call for message in messages if isinstance(message["content"], Placeholder)]
        if not pending:
            return
        if self._noted:
            self._start()
        self._runner.join(self._chain_of[pending[0].row])
        in_order = sorted(messages, key=_is_coroutine)  # TRL has those that are awaited after all others
        told = [(message["name"], self._said(message["content"])) for message in in_order]
        for message, (name, content) in zip(messages, told, strict=True):
            message.update(name=name, content=content)
        self._unanswered -= len(pending)

    def check(self) -> None:
        """See `ToolAnswers`."""
        if self._unanswered:
            raise RuntimeError(f"{self._unanswered} calls of tools were never answered: their messages hold nothing")

    def close(self) -> None:
        """See `ToolAnswers`."""
        self._runner.stop()
        for call in self._coroutines:
            if not call.ended.done():
                self._event_loop().call_soon_threadsafe(call.cancel)

    def _noting(self, row: int, name: str, tool: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(tool)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._note(ToolCall(row, name, partial(tool, *args, **kwargs), owner=self._owner(row, tool)))

        return call

    def _noting_coroutine(self, row: int, name: str, tool: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(tool)
        def call(*args: Any, **kwargs: Any) -> Any:
            coroutine = tool(*args, **kwargs)  # arguments that do not fit are an error here, as in TRL
            return self._note(ToolCall(row, name, None, coroutine, owner=self._owner(row, tool)))

        return call

    def _note(self, call: ToolCall) -> Placeholder:
        self._noted.append(call)
        if call.coroutine is not None:
            self._coroutines.append(call)
        self._unanswered += 1
        placeholder = Placeholder("")
        placeholder.call = call
        return placeholder

    def _owner(self, row: int, tool: Callable[..., Any]) -> Any:
        """What is not called beside a call that was given up: an environment, and all tools where calls are serial."""
        of = getattr(tool, "__self__", tool)
        is_environment = self._environments is not None and of is self._environments[row]
        return of if is_environment or not self._is_shared else None

    def _start(self) -> None:
        chains: dict[Hashable, dict[int, list[ToolCall]]] = {}
        for call in self._noted:
            chains.setdefault(self._chain(call.row), {}).setdefault(call.row, []).append(call)
        by_row: list[Chain] = [[*rows.values()] for rows in chains.values()]
        for rows, end in zip(chains.values(), self._runner.start(by_row), strict=True):
            self._chain_of.update(dict.fromkeys(rows, end))
        self._noted = []

    def _chain(self, row: int) -> Hashable:
        """A factory may give one environment to several rows."""
        return ("row", row) if self._environments is None else ("environment", id(self._environments[row]))

    def _said(self, content: Any) -> Any:
        """What TRL's loop makes of a call's answer."""
        if not isinstance(content, Placeholder):
            return content
        call = content.call
        self.late += call.is_late
        if call.error is not None:
            self.failures += 1
            if isinstance(call.error, SearchUnavailable):
                self.unavailable.add(call.row)
            return str({"error": str(call.error)})
        return call.value if isinstance(call.value, list) else str(call.value)


def _is_coroutine(message: dict[str, Any]) -> bool:
    content = message["content"]
    return isinstance(content, Placeholder) and content.call.coroutine is not None
