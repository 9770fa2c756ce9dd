"""Runs the user's agents: coroutines in one event loop, functions in threads, commands in separate processes."""

from __future__ import annotations

import asyncio
import atexit
import inspect
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from tempfile import TemporaryFile
from traceback import extract_tb
from typing import IO, Any, TypeAlias

import psutil

from sorl_trl.command_line import UserMistake
from sorl_trl.rollout.responder import contained
from sorl_trl.search.backend import causes, is_down
from sorl_trl.text import one_line
from sorl_trl.threads import DaemonThreads, made_once, start

_EXCERPT = 600
_PROCESSES: set[int] = set()
"""The agents that run in separate processes."""
_NOT_THE_USERS = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[1]))
"""Folders of code that is not the user's."""
_OF_A_LOOP = re.compile("event loop|attached to a different loop", re.IGNORECASE)
"""In asyncio's messages, which are RuntimeErrors without a class of their own."""


class AgentMistake(UserMistake, RuntimeError):
    """An agent's request, return value or error shows that its code or setup must change. Commands print one line."""


@dataclass(frozen=True)
class Access:
    """The policy's address for one trajectory, for clients of OpenAI and of Anthropic."""

    base_url: str
    api_key: str

    @property
    def environment(self) -> dict[str, str]:
        """The variables from which these clients read it."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
        }


Agent: TypeAlias = Callable[[dict[str, Any], Access], Any]
"""An agent gets a row of the dataset and its access to the policy. It returns a reward, rewards by name, or None."""


@dataclass(frozen=True)
class Outcome:
    """How an agent's run ended."""

    rewards: Mapping[str, float] | None = None
    """The rewards that it returned, by name; None if it returned none or did not return."""
    error: BaseException | None = None
    """The error that it raised."""
    is_late: bool = False
    """Whether it exceeded its time limit."""

    @property
    def failure(self) -> BaseException | None:
        """The error that it raised, unless the error is unrelated to the policy."""
        return None if self.is_lost else self.error

    @property
    def is_lost(self) -> bool:
        """Whether the outcome is unrelated to the policy: time ran out, or a connection was lost."""
        return self.is_late or (is_down(self.error) and not self.is_of_a_loop)

    @property
    def is_of_a_loop(self) -> bool:
        """Whether an error of asyncio's caused it, as when a client of one event loop is used in another."""
        return any(type(each) is RuntimeError and _OF_A_LOOP.search(str(each)) for each in causes(self.error))


def described(error: BaseException) -> str:
    """An error in one line, with its first cause and the last line of the user's code that it passed."""
    first = [error, *causes(error)][-1]
    chain = [error] if first is error else [error, first]
    text = ", from ".join(f"{type(each).__name__}: {one_line(each)[:_EXCERPT]}" for each in chain)
    frames = [each for each in extract_tb(error.__traceback__) if not each.filename.startswith(_NOT_THE_USERS)]
    return f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text


def run_agent(
    agent: Agent, example: Mapping[str, Any], access: Access, time_limit_s: float, on_end: Callable[[Outcome], None]
) -> Future[Outcome]:
    """Start an agent. `on_end` is called when it has ended or its time is up, before the outcome is available."""

    async def run() -> Outcome:
        outcome = await _outcome(_called(agent, dict(example), access), time_limit_s)
        on_end(outcome)
        return outcome

    return asyncio.run_coroutine_threadsafe(run(), _loop())


async def _outcome(called: Awaitable[Any], time_limit_s: float) -> Outcome:
    """Wait for an agent, and end it when its time is up or, with CancelledError, when nobody waits any more."""
    began = time.monotonic()
    task = asyncio.ensure_future(contained(called))
    task.add_done_callback(retrieve)
    try:
        await asyncio.wait({task}, timeout=time_limit_s)
        # A coroutine that blocks keeps the loop from noticing that the time is up.
        if not task.done() or time.monotonic() - began > time_limit_s:
            return Outcome(is_late=True)
        return Outcome(_rewards(task.result()))
    except Exception as error:
        return Outcome(error=error)
    except asyncio.CancelledError as error:
        if not task.done():
            raise
        return Outcome(error=error)
    finally:
        task.cancel()  # if it has not ended; it is not waited for, because it may not obey


def retrieve(ended: asyncio.Future[Any]) -> None:
    """Take note of an error that comes when nobody waits any more, because asyncio would log its traceback."""
    if not ended.cancelled():
        ended.exception()


@made_once
def _loop() -> asyncio.AbstractEventLoop:
    """The loop of all agents, for the life of the process: HTTP clients keep their connections with a loop."""
    loop = asyncio.new_event_loop()
    start(loop.run_forever, "sorl-agents")
    return loop


async def _called(agent: Agent, example: dict[str, Any], access: Access) -> Any:
    if inspect.iscoroutinefunction(agent) or inspect.iscoroutinefunction(getattr(agent, "__call__", None)):  # noqa: B004
        return await agent(example, access)

    def call() -> Any:
        try:
            return agent(example, access)
        except (StopIteration, KeyboardInterrupt, SystemExit) as error:  # which no future holds
            raise RuntimeError(f"an agent raised {error!r}") from error

    # A thread of its own, because one that never ends must not keep others from running.
    in_thread = asyncio.wrap_future(DaemonThreads(1, "sorl-agent").submit(call))
    in_thread.add_done_callback(retrieve)
    returned = await asyncio.shield(in_thread)
    return await returned if isinstance(returned, Awaitable) else returned


def _rewards(returned: Any) -> dict[str, float] | None:
    """What an agent returned as rewards by name. Raises AgentMistake for anything else."""
    if returned is None:
        return None
    named = returned if isinstance(returned, Mapping) else {"reward": returned}
    if not named or not all(isinstance(name, str) and _is_finite(each) for name, each in named.items()):
        raise AgentMistake(
            f"the agent returned {returned!r:.200}, but must return a finite number, a dict of such numbers, or None "
            "to leave the reward to `reward_funcs`"
        )
    return {name: float(value) for name, value in named.items()}


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


class CommandError(RuntimeError):
    """An agent's process failed."""


def command_agent(command: str) -> Agent:
    """An agent in a separate process, in any language.

    `command` is run for each trajectory, without a shell. It has `OPENAI_BASE_URL`, `OPENAI_API_KEY`,
    `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY` in its environment and gets the row of the dataset as JSON on standard
    input. The last line that it writes to standard output is the reward: a number, or an object with rewards by name.
    Without a line, or with `null`, `reward_funcs` give the reward. A nonzero exit code counts as an error.

    Raises ValueError for a command that cannot be split into words, or a program that is not found.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"`agent_command` is {command!r}: {error}") from error
    if not words or shutil.which(words[0]) is None:
        raise ValueError(f"`agent_command` is {command!r}, but must begin with an existing program.")

    async def agent(example: dict[str, Any], access: Access) -> Any:
        # Files, because a pipe would stay open as long as anything that the command has started.
        with TemporaryFile() as given, TemporaryFile() as output, TemporaryFile() as errors:
            given.write(json.dumps(example, default=str).encode())
            given.seek(0)
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=given,
                stdout=output,
                stderr=errors,
                env={**os.environ, **access.environment},
                start_new_session=True,  # so that what it starts ends with it
            )
            _PROCESSES.add(process.pid)
            try:
                await process.wait()
            finally:
                _end(process.pid)
            if process.returncode:
                reason = one_line(_text(errors))[-_EXCERPT:] or "it wrote nothing to standard error"
                raise CommandError(f"{words[0]} ended with {_exit(process.returncode)}: {reason}")
            return _reward(words[0], _text(output).rpartition("\n")[2])

    return agent


def _exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _end(process: int) -> None:
    """End an agent's process and those that it started, as tools of coding agents do in sessions of their own."""
    _PROCESSES.discard(process)
    with suppress(psutil.NoSuchProcess):
        for each in psutil.Process(process).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                each.kill()
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


@atexit.register
def _end_all() -> None:
    for process in [*_PROCESSES]:
        _end(process)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace").strip()


def _reward(program: str, line: str) -> Any:
    """The content of a command's last line. Raises AgentMistake if it is not JSON."""
    try:
        return json.loads(line) if line else None
    except ValueError as error:
        raise AgentMistake(
            f"the last line of {program} is {line[:_EXCERPT]!r}, but must be a number, numbers by name, or null"
        ) from error
