"""Runs the user's agents: coroutines in one event loop, functions in threads, commands in processes of their own."""

from __future__ import annotations

import asyncio
import atexit
import inspect
import json
import math
import os
import shlex
import signal
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from numbers import Real
from typing import Any, TypeAlias

from sorl_trl.text import one_line
from sorl_trl.threads import start

_EXCERPT = 300
_PROCESSES: set[int] = set()
"""The agents that run in processes of their own."""
_LOST = frozenset({"APIConnectionError", "ClientConnectionError", "ConnectionError", "TransportError"})
"""Names of classes with which HTTP clients report that a connection was lost."""


@dataclass(frozen=True)
class Access:
    """The policy's address for one trajectory, as an OpenAI client takes it."""

    base_url: str
    api_key: str


Agent: TypeAlias = Callable[[dict[str, Any], Access], Any]
"""An agent gets a row of the dataset and its access to the policy. It returns a reward, rewards by name, or None."""


@dataclass(frozen=True)
class Outcome:
    """How a run of an agent ended."""

    rewards: Mapping[str, float] | None = None
    """What it returned, by name; None if it left the rewards to others, or has not returned."""
    error: BaseException | None = None
    """What it raised."""
    is_late: bool = False
    """Whether its time was up."""

    @property
    def is_lost(self) -> bool:
        """Whether this says nothing about the policy: the time was up, or a connection was lost."""
        return self.is_late or (self.error is not None and is_lost_connection(self.error))


def run_agent(
    agent: Agent, example: Mapping[str, Any], access: Access, time_limit_s: float, on_end: Callable[[], None]
) -> Future[Outcome]:
    """Start an agent, and call `on_end` when it has ended or its time is up, before the outcome is known."""

    async def run() -> Outcome:
        task = asyncio.ensure_future(_called(agent, dict(example), access))
        try:
            await asyncio.wait({task}, timeout=time_limit_s)
            if not task.done():
                return Outcome(is_late=True)
            if error := task.exception():
                return Outcome(error=error)
            return Outcome(_rewards(task.result()))
        except BaseException as error:  # a wrong reward, or an agent that cancels itself
            return Outcome(error=error)
        finally:
            task.cancel()  # and it is not waited for, because it may not obey
            on_end()

    return asyncio.run_coroutine_threadsafe(run(), _loop())


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """The loop of all agents, for the life of the process: HTTP clients keep their connections with a loop."""
    loop = asyncio.new_event_loop()
    start(loop.run_forever, "sorl-agents")
    return loop


async def _called(agent: Agent, example: dict[str, Any], access: Access) -> Any:
    if inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(getattr(agent, "__call__", None)):  # noqa: B004
        return await _unless_it_exits(agent(example, access))
    loop, returned = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def call() -> None:
        try:
            result, error = agent(example, access), None
        except BaseException as raised:
            result, error = None, raised
        loop.call_soon_threadsafe(_settle, returned, result, error)

    start(call, "sorl-agent")  # a thread of its own, because one that never ends must not keep others from running
    result = await returned
    return await _unless_it_exits(result) if isinstance(result, Awaitable) else result


async def _unless_it_exits(agent: Awaitable[Any]) -> Any:
    try:
        return await agent
    except (KeyboardInterrupt, SystemExit) as error:  # these would end the loop of all agents
        raise RuntimeError(f"an agent raised {error!r}") from error


def _settle(returned: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if returned.done():
        return
    if isinstance(error, StopIteration | KeyboardInterrupt | SystemExit):  # a future cannot hold these
        error = RuntimeError(f"an agent raised {error!r}")
    returned.set_result(result) if error is None else returned.set_exception(error)


def _rewards(returned: Any) -> dict[str, float] | None:
    """What an agent returned as rewards by name. Raises WrongReward for anything else."""
    if returned is None:
        return None
    named = returned if isinstance(returned, Mapping) else {"reward": returned}
    if not named or not all(isinstance(name, str) and _is_finite(each) for name, each in named.items()):
        raise WrongReward(
            f"the agent returned {returned!r:.200}, but must return a finite number, such numbers by name, or None, "
            "which leaves the reward to `reward_funcs`"
        )
    return {name: float(value) for name, value in named.items()}


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


class WrongReward(TypeError):
    """An agent returned something that is no reward."""


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error, or what caused it, is that of a connection."""
    seen: BaseException | None = error
    while seen is not None:
        names = {each.__name__ for each in type(seen).__mro__}
        if isinstance(seen, ConnectionError | TimeoutError) or names & _LOST:
            return True
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return False


class CommandError(RuntimeError):
    """An agent's process has failed."""


def command_agent(command: str) -> Agent:
    """An agent in a process of its own, in whatever language.

    `command` is run for each trajectory, without a shell. It has `OPENAI_BASE_URL` and `OPENAI_API_KEY` in its
    environment and gets the row of the dataset as JSON on standard input. The last line that it writes to standard
    output is the reward: a number, or an object with rewards by name. Without a line, or with `null`, `reward_funcs`
    decide. If it ends with another exit code than 0, it has raised an error.

    Raises ValueError for a command that cannot be read as words.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"`agent_command` is {command!r}: {error}") from error
    if not words:
        raise ValueError(f"`agent_command` is {command!r}, but must name a program.")

    async def agent(example: dict[str, Any], access: Access) -> Any:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "OPENAI_BASE_URL": access.base_url, "OPENAI_API_KEY": access.api_key},
            start_new_session=True,  # so that what it starts ends with it
        )
        _PROCESSES.add(process.pid)
        try:
            output, errors = await process.communicate(json.dumps(example, default=str).encode())
        finally:
            _end(process.pid)
        if process.returncode:
            said = errors.decode(errors="replace").strip().splitlines()
            raise CommandError(
                f"{words[0]} ended with exit code {process.returncode}: {''.join(said[-1:])[-_EXCERPT:]}"
            )
        return _last_line(words[0], output.decode(errors="replace"))

    return agent


def _end(process: int) -> None:
    """End an agent's process, and what it has started."""
    _PROCESSES.discard(process)
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


@atexit.register
def _end_all() -> None:
    for process in [*_PROCESSES]:
        _end(process)


def _last_line(program: str, output: str) -> Any:
    lines = output.strip().splitlines()
    if not lines:
        return None
    try:
        return json.loads(lines[-1])
    except ValueError as error:
        raise WrongReward(
            f"the last line of {program} is {one_line(lines[-1])[:_EXCERPT]!r}, but must be a number, an object with "
            "numbers by name, or null"
        ) from error
