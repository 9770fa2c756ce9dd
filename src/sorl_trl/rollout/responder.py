"""A responder with one environment per trajectory. Its calls may take long or never return."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import wait as wait_for
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

from sorl_trl.checks import POSITIVE_COUNT, Number
from sorl_trl.rollout.environment import THREAD, Environment, Reply, Responder, ResponderRow
from sorl_trl.rollout.protocol import TagProtocol
from sorl_trl.search.backend import is_down
from sorl_trl.threads import DaemonThreads, start
from sorl_trl.types import StopReason, Turn

logger = logging.getLogger(__name__)

TIMEOUT_S = 60.0
"""Our choice; a search is also retried for this long."""
CONCURRENCY = 64
"""Our choice of how many steps run at the same time."""
ENVIRONMENT = "environment"
"""The column that names a row's factory, if there are several, as in TRL."""
Factory: TypeAlias = "Callable[[], Environment]"
Wait: TypeAlias = "Callable[[Any], Any]"
"""Returns a value, awaited if it is awaitable."""
UNAVAILABLE = Reply(stop=StopReason.ENVIRONMENT_UNAVAILABLE)


class Abandoned(BaseException):
    """Raised in the thread of an abandoned call to stop it."""


class Calls:
    """The calls of one rollout.

    Each row's calls run in their own thread, because objects may be bound to a thread, as SQLite connections are.
    Awaitables run in an event loop that all rows share. Calls of at most `concurrency` rows run at the same time. A
    call that takes longer than `timeout_s` is abandoned: a coroutine is cancelled, and a thread runs until it returns,
    but its result is ignored. All threads are daemons, so a hanging call does not keep the process from ending.
    """

    def __init__(self, rows: int, timeout_s: float, concurrency: int) -> None:
        self._timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
        self._free = threading.Semaphore(concurrency)
        self._open: set[Future[Any]] = set()
        self._rows = [DaemonThreads(1, THREAD) for _ in range(rows)]
        started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        start(lambda: asyncio.run(_serve(started)), THREAD)
        self._loop, self._ended = started.result()

    def make(self, row: int, function: Callable[[Wait], Any], late: Any) -> Future[Any]:
        """Call `function` in the row's thread. It gets a function that awaits coroutines.

        The future gets the function's result or error (even KeyboardInterrupt), or `late` if it takes too long.
        """
        answer: Future[Any] = Future()
        self._open.add(answer)
        answer.add_done_callback(self._open.discard)
        self._rows[row].submit(self._call, function, late, answer)
        return answer

    def close(self) -> None:
        """Abandon all current and future calls, without waiting."""
        for answer in list(self._open):
            if answer.cancel():
                answer.set_running_or_notify_cancel()  # tells those who wait for it
        self._rows.clear()
        self._loop.call_soon_threadsafe(self._ended.set)

    def _call(self, function: Callable[[Wait], Any], late: Any, answer: Future[Any]) -> None:
        self._free.acquire()
        answer.add_done_callback(lambda _: self._free.release())
        if answer.done():
            return
        timer = threading.Timer(self._timeout_s, self._give_up, (answer, late))
        timer.daemon = True
        timer.start()
        answer.add_done_callback(lambda _: timer.cancel())
        try:
            _settle(answer, function(partial(self._awaited, answer)))
        except SystemExit as error:  # it would end the run without a message
            _settle(answer, error=RuntimeError(f"an environment raised {error!r}"))
        except BaseException as error:  # it is raised where the answer is awaited
            _settle(answer, error=error)

    def _give_up(self, answer: Future[Any], late: Any) -> None:
        logger.warning("a call of an environment or tool is abandoned after timeout_s=%g", self._timeout_s)
        _settle(answer, late)

    def _awaited(self, answer: Future[Any], value: Any) -> Any:
        """The value, awaited if it is awaitable. Raises Abandoned if the call was abandoned."""
        if answer.done():
            if inspect.iscoroutine(value):
                value.close()
            raise Abandoned
        if not inspect.isawaitable(value):
            return value
        outcome = asyncio.run_coroutine_threadsafe(contained(value), self._loop)
        answer.add_done_callback(lambda _: outcome.cancel())
        wait_for([outcome])
        if answer.done():
            raise Abandoned
        return outcome.result()


async def contained(awaitable: Any) -> Any:
    """Await something. Errors that would end the shared loop become a RuntimeError."""
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"a coroutine raised {error!r}") from error


def _settle(answer: Future[Any], value: Any = None, error: BaseException | None = None) -> None:
    """Set the result or the error, unless the answer was abandoned in the meantime."""
    with suppress(InvalidStateError):
        answer.set_result(value) if error is None else answer.set_exception(error)


async def _serve(started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]) -> None:
    """Publish the loop and the event that ends it. `asyncio.run` then cancels what has not ended."""
    ended = asyncio.Event()
    started.set_result((asyncio.get_running_loop(), ended))
    await ended.wait()


class EnvironmentResponder(Responder):
    """Answers each row's turns with the row's own environment, while other rows continue.

    At the beginning of a rollout, `factory` is called once per row, in order. If there are several factories, the
    row's column `environment` names one. `Environment` describes the objects.

    Each object is made, reset and called in its own thread; coroutines run in an event loop that all rows share. If a
    `reset` or `step` takes longer than `timeout_s`, or its world is down, the trajectory ends as
    `ENVIRONMENT_UNAVAILABLE` and is masked out of the loss.

    Args:
        factory: Makes an environment: a class, or a function without arguments; or several of them by name. If it has
            an attribute `protocol`, that parses the policy's text into actions.
        timeout_s: Time limit in seconds for one `step` or `reset`; infinity for none.
        concurrency: How many steps may run at the same time.

    Raises TypeError if that `protocol` is not a `TagProtocol`, and ValueError if a number is out of range or a row's
    column `environment` does not name a factory.
    """

    def __init__(
        self, factory: Factory | Mapping[str, Factory], timeout_s: float = TIMEOUT_S, concurrency: int = CONCURRENCY
    ) -> None:
        Number(above=0, finite=False).check("timeout_s", timeout_s)
        POSITIVE_COUNT.check("concurrency", concurrency)
        self._factories: Mapping[Any, Factory] = factory if isinstance(factory, Mapping) else {None: factory}
        self.protocol = getattr(factory, "protocol", None)
        if not isinstance(self.protocol, TagProtocol | None):
            raise TypeError(f"`protocol` of {factory!r} is {self.protocol!r}, but must be a `TagProtocol`")
        self._timeout_s = timeout_s
        self._concurrency = concurrency
        self._calls: Calls | None = None
        self._down: set[int] = set()

    def open(self, examples: Sequence[Mapping[str, Any]]) -> Sequence[ResponderRow]:
        """Begin a rollout: make and reset its environments. What a `reset` returns is the row's greeting.

        Raises TypeError if an object has no method `step`, or if its `reset` needs a column that is missing or returns
        neither text nor None; TimeoutError if a `factory` does not return; and any error that either raises.
        """
        self.close()
        kinds: list[str | None] = [None] * len(examples)
        if None not in self._factories:
            kinds = [self._kind(example) for example in examples]
            examples = [{key: value for key, value in each.items() if key != ENVIRONMENT} for each in examples]
        calls = self._calls = Calls(len(examples), self._timeout_s, self._concurrency)
        self.environments = [self._made(calls, row, kind) for row, kind in enumerate(kinds)]
        resets = [
            calls.make(row, partial(_reset, each, examples[row]), UNAVAILABLE)
            if callable(getattr(each, "reset", None))
            else None
            for row, each in enumerate(self.environments)
        ]
        said: list[Any] = [reset and reset.result() for reset in resets]
        self._down = {row for row, text in enumerate(said) if text is UNAVAILABLE}
        greetings: list[str | None] = [None if text is UNAVAILABLE else text for text in said]
        self.rows = [*map(ResponderRow, greetings, kinds, self.environments)]
        return self.rows

    def ask(self, turns: Mapping[int, Turn]) -> dict[int, Future[Reply]]:
        return {row: self._ask(row, turn) for row, turn in turns.items()}

    def close(self) -> None:
        """See `Responder.close`. The environments are kept until the next rollout begins."""
        if self._calls is not None:
            self._calls.close()
        self._calls = None

    def _ask(self, row: int, turn: Turn) -> Future[Reply]:
        assert self._calls is not None, "`open` must come before `ask`"
        if row in self._down:
            future: Future[Reply] = Future()
            future.set_result(UNAVAILABLE)
            return future
        return self._calls.make(row, partial(self._step, self.rows[row].environment, turn), UNAVAILABLE)

    def _step(self, environment: Any, turn: Turn, wait: Wait) -> Any:
        return _result(environment.step, lambda: environment.step(turn), wait, Reply)

    def _kind(self, example: Mapping[str, Any]) -> str:
        name = example.get(ENVIRONMENT)
        if name not in self._factories:
            known = [*self._factories]
            raise ValueError(f"a row has {ENVIRONMENT}={name!r}, which is not among the environments {known}")
        return str(name)

    def _made(self, calls: Calls, row: int, kind: str | None) -> Any:
        """Make a row's environment in its thread, and wait for it, so that factories may count."""
        late = object()
        factory = self._factories[kind]
        environment = calls.make(row, lambda wait: wait(factory()), late).result()
        if environment is late:
            raise TimeoutError(f"the factory of environments did not return within timeout_s={self._timeout_s}")
        if not callable(getattr(environment, "step", None)):
            raise TypeError(
                f"the factory made a {type(environment).__name__}, but an environment must have a method `step`"
            )
        return environment


def _reset(environment: Any, example: Mapping[str, Any], wait: Wait) -> Any:
    return _result(environment.reset, lambda: call_with(environment.reset, example), wait, str | None)


def _result(method: Any, call: Callable[[], Any], wait: Wait, kind: Any) -> Any:
    """The result of calling a method, or `UNAVAILABLE` if the environment is down."""
    name = getattr(method, "__qualname__", repr(method))
    try:
        result = wait(call())
    except BaseException as error:
        if is_down(error):
            logger.warning("%s is unavailable, so a trajectory is masked: %r", name, error)
            return UNAVAILABLE
        raise
    if not isinstance(result, kind):
        must = 'a `Reply`, such as Reply("what the policy reads")' if kind is Reply else "text or None"
        raise TypeError(f"{name} returned a {type(result).__name__}, but must return {must}")
    return result


def call_with(method: Callable[..., Any], example: Mapping[str, Any]) -> Any:
    """Call `method` with the columns of an example named by its parameters, or all if it takes `**kwargs`.

    Raises TypeError if a parameter without a default has no column.
    """
    parameters = inspect.signature(method).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        taken = dict(example)
    else:
        taken = {each.name: example[each.name] for each in parameters if each.name in example}
    named = [each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    needed = [each.name for each in named if each.default is each.empty]
    if missing := [name for name in needed if name not in taken]:
        name = getattr(method, "__qualname__", repr(method))
        raise TypeError(f"{name} needs {missing}, but an example has only {sorted(example)}")
    return method(**taken)
