"""A responder with one environment per trajectory."""

from __future__ import annotations

import inspect
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from traceback import walk_tb
from typing import Any, TypeAlias

from sorl_trl.checks import POSITIVE_COUNT, Number
from sorl_trl.command_line import UserMistake
from sorl_trl.rollout.environments.calls import Calls
from sorl_trl.rollout.environments.environment import Environment, Reply, Responder, RowTurn
from sorl_trl.rollout.protocol import TagProtocol
from sorl_trl.search.backend import is_down
from sorl_trl.types import StopReason, Turn

logger = logging.getLogger(__name__)

TIMEOUT_S = 60.0
"""Our choice, which is also how long a search is retried."""
CONCURRENCY = 64
"""Our choice of how many steps run at the same time."""
ENVIRONMENT = "environment"
"""The column that names a row's factory if there are several, as in TRL."""
Factory: TypeAlias = "Callable[[], Environment]"
UNAVAILABLE = Reply(stop=StopReason.ENVIRONMENT_UNAVAILABLE)
_MUST_RETURN: Mapping[str, tuple[Any, str]] = {
    "reset": (str | None, "text or None"),
    "step": (Reply, 'a `Reply`, such as Reply("what the policy reads")'),
}


class EnvironmentResponder(Responder):
    """Answers each row's turns with the row's own environment, while other rows continue.

    At the beginning of a rollout, `factory` is called once per row, in order. If there are several factories, the
    row's column `environment` names one. `Environment` describes the objects.

    Each object is made, reset and called in its own thread; coroutines run in an event loop that all rows share. If a
    `reset` or `step` takes longer than `timeout_s`, or its world is down, the trajectory ends as
    `ENVIRONMENT_UNAVAILABLE`, masked out of the loss.

    Args:
        factory: Makes an environment: a class, or a function without arguments; or several of them by name. If it has
            an attribute `protocol`, that is how the policy's text becomes its actions.
        timeout_s: Seconds for one `step` or one `reset`; infinity sets no limit.
        concurrency: How many steps may run at the same time.

    Raises TypeError if that `protocol` is no `TagProtocol`, and ValueError if a number is out of range, or a row's
    column `environment` names no factory.
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
        self._greetings: list[str | None] | None = None
        self._down: set[int] = set()
        self._environments: list[Any] = []

    @property
    def environments(self) -> Sequence[Any]:  # type: ignore[override]
        """The environments of the last rollout, one per row. Trainers pass them to reward functions."""
        return self._environments

    def greet(self, examples: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """Begin a rollout by resetting its environments, and return what each says. `open` continues with them.

        Raises TypeError if an object has no method `step`, or if its `reset` needs a column that is missing or returns
        neither text nor None; TimeoutError if a `factory` does not return; and whatever either raises.
        """
        self.close()
        if None not in self._factories:
            self.kinds = [self._kind(example) for example in examples]
            examples = [{key: value for key, value in each.items() if key != ENVIRONMENT} for each in examples]
        else:
            self.kinds = [None] * len(examples)
        self._calls = Calls(len(examples), self._timeout_s, self._concurrency)
        try:
            self._down = set()
            self._environments = [self._made(self._calls, row) for row in range(len(examples))]
            self._greetings = self._reset(self._calls, examples)
        except BaseException:
            self.close()
            raise
        return self._greetings

    def open(self, examples: Sequence[Mapping[str, Any]]) -> None:
        """See `Responder.open`. Raises what `greet` raises, and ValueError for greetings if it was not called."""
        said = [] if self._greetings is not None else list(filter(None, self.greet(examples)))
        if said:
            self.close()
            raise ValueError(
                f"`reset` returned {said[0][:80]!r}, which belongs into the prompt: call `greet` before the prompts "
                "are encoded, or have `reset` return None"
            )
        self._greetings = None

    def measures(self, row: int) -> Mapping[str, float]:
        """See `Responder.measures`: the row's environment answers, if it has such a method."""
        measures: Callable[[], Mapping[str, float]] | None = getattr(self._environments[row], "measures", None)
        return (measures() or {}) if callable(measures) else {}

    def ask(self, turns: Sequence[RowTurn]) -> list[Future[Reply]]:
        return [self._ask(each.row, each.turn) for each in turns]

    def close(self) -> None:
        """See `Responder.close`. The environments are kept until the next rollout begins."""
        if self._calls is not None:
            self._calls.close()
        self._calls, self._greetings = None, None

    def _ask(self, row: int, turn: Turn) -> Future[Reply]:
        assert self._calls is not None, "`open` must come before `ask`"
        if row in self._down:
            future: Future[Reply] = Future()
            future.set_result(UNAVAILABLE)
            return future
        environment = self._environments[row]
        return self._calls.make(row, partial(environment.step, turn), UNAVAILABLE, partial(_said, environment, "step"))

    def _kind(self, example: Mapping[str, Any]) -> str:
        name = example.get(ENVIRONMENT)
        if name not in self._factories:
            raise ValueError(f"a row has {ENVIRONMENT}={name!r}, but there are {[*self._factories]}")
        return str(name)

    def _made(self, calls: Calls, row: int) -> Any:
        """Make a row's environment in its thread, and wait for it, so that factories may count."""
        late = object()
        environment = calls.make(row, self._factories[self.kinds[row]], late, _value).result()
        if environment is late:
            raise TimeoutError(f"the factory of environments did not return within timeout_s={self._timeout_s}")
        if not callable(getattr(environment, "step", None)):
            raise TypeError(f"the factory made a {type(environment).__name__}: an environment has a method `step`")
        return environment

    def _reset(self, calls: Calls, examples: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """Reset all environments at the same time, and return what each says."""
        resets = {
            row: calls.make(
                row,
                partial(call_with, environment.reset, examples[row]),
                UNAVAILABLE,
                partial(_said, environment, "reset"),
            )
            for row, environment in enumerate(self._environments)
            if callable(getattr(environment, "reset", None))
        }
        said: list[str | None] = [None] * len(examples)
        for row, reset in resets.items():
            greeting = reset.result()
            if greeting is UNAVAILABLE:
                self._down.add(row)
            else:
                said[row] = greeting
        return said


def call_with(method: Callable[..., Any], example: Mapping[str, Any]) -> Any:
    """Call `method` with the columns of an example that it has parameters for, or all if it takes `**kwargs`.

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
        raise TypeError(f"{name} needs {missing}, but an example has {sorted(example)}")
    return method(**taken)


def check_signals(name: str, error: BaseException | None) -> None:
    """Raise UserMistake if Python has refused to handle a signal, which it allows in the main thread alone."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)] if isinstance(error, ValueError) else []
    if frames and frames[-1].f_globals["__name__"] == signal.__name__:
        raise UserMistake(
            f"{name} sets a signal handler, as for `signal.alarm`, but is called in a thread, where Python allows "
            "none: leave its limit of time to `timeout_s`, or give the trainer `tools=` without `async_staleness`."
        ) from error


def _value(value: Any, error: BaseException | None) -> Any:
    if isinstance(error, SystemExit):  # it would end the run without a message
        raise RuntimeError(f"an environment raised {error!r}") from error
    if error is not None:
        raise error
    return value


def _said(environment: Any, method: str, value: Any, error: BaseException | None) -> Any:
    """What a method returned, or `UNAVAILABLE` if the environment is down."""
    name = f"{type(environment).__name__}.{method}"
    if is_down(error):
        logger.warning("%s is unavailable, a trajectory is masked: %r", name, error)
        return UNAVAILABLE
    check_signals(name, error)
    kind, words = _MUST_RETURN[method]
    if isinstance(_value(value, error), kind):
        return value
    raise TypeError(f"{name} returned a {type(value).__name__}, but must return {words}")
