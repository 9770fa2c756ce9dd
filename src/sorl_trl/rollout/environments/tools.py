"""Tools for one rollout, as TRL's trainers take them: functions, the methods of objects, and a search engine."""

from __future__ import annotations

import copy
import inspect
import json
import logging
from asyncio import CancelledError
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeAlias, get_args, get_origin, get_type_hints

from transformers.utils.chat_template_utils import get_json_schema

from sorl_trl.rollout.environments.environment import Reply, Responder, RowTurn
from sorl_trl.rollout.environments.responder import (
    CONCURRENCY,
    TIMEOUT_S,
    UNAVAILABLE,
    EnvironmentResponder,
    Wait,
    check_signals,
)
from sorl_trl.rollout.environments.search import SearchResponder
from sorl_trl.rollout.protocol import ChatProtocol, TagProtocol
from sorl_trl.search import SearchBackend
from sorl_trl.search.backend import is_down
from sorl_trl.types import ActionKind, StopReason, ToolResult, Turn

logger = logging.getLogger(__name__)

Tool: TypeAlias = "Callable[..., Any]"
Factory: TypeAlias = "Callable[[], Any]"
SEARCH = ActionKind.SEARCH.value
_USE_OF_SEARCH = "a search query; passages are then shown to you"
_NOT_TOOLS = ("reset", "get_reward")
_READ = (str, int, float, bool)


# -------------------------------------------------------------------------------------------------------------------
# Calling tools
# -------------------------------------------------------------------------------------------------------------------


class Unavailable(str):
    """Return it from a tool whose world is down: the trajectory is then masked out of the loss.

    This works in TRL's own tool loop, too, where the policy reads the text. TRL puts `str()` of a tool's result into a
    message, which for this class is the object itself, so that it can be recognized there.
    """

    def __str__(self) -> str:
        return self


class ToolError(Exception):
    """A call went wrong. The message is for the policy."""


def call_tool(tool: Tool, arguments: Any, wait: Wait) -> str | list[Any]:
    """Call a tool, in TRL's tool loop as in a `ToolBox`, and return what the policy is told.

    That is the result as text, unless it is a list, which reward functions get as it is, or an `Unavailable` if the
    tool is down.

    Raises ToolError for any other error of the tool or its arguments, even `SystemExit`, because a policy's Python may
    say `exit()`, and UserMistake for a tool that sets signal handlers, because all its calls would fail.
    """
    try:
        result = wait(tool(**arguments))
        text = plain_text(result)
        return result if isinstance(result, list | Unavailable) else text
    except (Exception, SystemExit, CancelledError) as error:
        name = getattr(tool, "__qualname__", tool.__name__)
        if is_down(error):
            logger.warning("%s is unavailable, a trajectory is masked: %r", name, error)
            return Unavailable(f"{tool.__name__} is unavailable")
        check_signals(name, error)
        message, shown = _texts_of(error)
        if _fits(tool, arguments):  # otherwise it is the policy's error
            logger.warning("%s raised %s, which is told to the policy", name, shown)
        raise ToolError(message) from error


def plain_text(value: Any) -> str:
    """`str(value)`, without any subclass of `str`."""
    return str.__str__(str(value))


def _texts_of(error: BaseException) -> tuple[str, str]:
    """An error as `str` and as `repr`, or the name of its class if one of these fails."""
    try:
        return str(error), repr(error)
    except Exception:
        return type(error).__name__, type(error).__name__


def _fits(tool: Tool, arguments: Any) -> bool:
    """Whether a tool takes these arguments, so that whatever it raises is its own error."""
    try:
        inspect.signature(tool).bind(**arguments)
    except TypeError:
        return False
    return True


class RowTools:
    """The tools of one trajectory: functions, and the methods of an object if a factory makes one."""

    def __init__(self, tools: Sequence[Tool], factory: Factory | None) -> None:
        self.object = None if factory is None else factory()
        self.reset = getattr(self.object, "reset", None)
        if self.object is not None and not callable(self.reset):
            made = type(self.object).__name__
            raise TypeError(f"the factory made a {made}: TRL's environments have a method `reset`")
        self.tools = named([*tools, *methods_of(self.object)])
        for name, tool in self.tools.items():
            if inspect.isgeneratorfunction(tool) or inspect.isasyncgenfunction(tool):
                raise TypeError(f"{name} is a generator, but must return what the policy is told")
            for each in inspect.signature(tool).parameters.values():
                if each.kind in (each.POSITIONAL_ONLY, each.VAR_POSITIONAL):
                    raise TypeError(f"{name} takes `{each}` by its place, but a policy gives arguments by name")

    def step(self, turn: Turn, wait: Wait) -> Reply:
        """Answer a call in a tag, or the calls of a message in order. A message without calls ends the trajectory."""
        action = turn.action
        if action.kind is not ActionKind.MESSAGE:
            return self._answer_tag(action.tool or SEARCH, action.content, wait)
        results = []
        for name, arguments in action.calls:
            try:
                result = call_tool(self._tool(name), arguments, wait)
            except ToolError as error:
                result = str({"error": str(error)})  # as in TRL
            if isinstance(result, Unavailable):
                return UNAVAILABLE
            results.append(ToolResult(name, str(result), result if isinstance(result, list) else None))
        return Reply(results=tuple(results)) if results else Reply(stop=StopReason.ENVIRONMENT_DONE)

    def _answer_tag(self, name: str, content: str, wait: Wait) -> Reply:
        try:
            tool = self._tool(name)
            result = call_tool(tool, read_arguments(tool, content), wait)
        except ToolError as error:
            return Reply(f"error: {error}")
        return UNAVAILABLE if isinstance(result, Unavailable) else Reply(str(result))

    def _tool(self, name: str) -> Tool:
        if name not in self.tools:
            raise ToolError(f"Tool {name} not found.")  # as in TRL
        return self.tools[name]


def methods_of(environment: Any) -> list[Tool]:
    """The tools of an object, ordered by name. They are found in its class, so that no property is evaluated."""
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    return [getattr(environment, name) for name in names if name not in _NOT_TOOLS and not name.startswith("_")]


def named(tools: Sequence[Tool]) -> dict[str, Tool]:
    """Tools by name. Raises ValueError if two have the same name, and TypeError if one has none."""
    if nameless := [tool for tool in tools if not hasattr(tool, "__name__")]:
        raise TypeError(f"a tool is {nameless[0]!r}, but must be a function or a method, which has a name")
    names = [tool.__name__ for tool in tools]
    if len({*names}) < len(names):
        raise ValueError(f"tools have the names {names}: each must have a name of its own")
    return dict(zip(names, tools, strict=True))


# -------------------------------------------------------------------------------------------------------------------
# Arguments in a tag
# -------------------------------------------------------------------------------------------------------------------


def read_arguments(method: Callable[..., Any], content: str) -> dict[str, Any]:
    """The arguments of `method`, from a JSON object as text; plain text works for a single argument.

    Numbers, truth values, lists and dictionaries may be written as text; arguments with other annotations are passed
    unchanged.

    Raises ToolError if the arguments do not fit.
    """
    parameters = inspect.signature(method).parameters
    named = _from_text(content, parameters)
    if named is None:
        raise ToolError(f"{method.__name__} takes a JSON object with {_expected(parameters)}")
    try:
        inspect.signature(method).bind(**named)
    except TypeError as error:
        raise ToolError(f"{method.__name__}: {error}; it takes {_expected(parameters)}") from error
    hints = _hints(method)
    return {name: _converted(method, name, value, hints.get(name)) for name, value in named.items()}


def _hints(method: Callable[..., Any]) -> dict[str, Any]:
    """Type hints; if some names are imported only for type checkers, only the hints in `_READ`."""
    try:
        return get_type_hints(method)
    except NameError:
        plain = {each.__name__: each for each in _READ}
        parameters = inspect.signature(method).parameters.values()
        return {each.name: plain[each.annotation] for each in parameters if each.annotation in plain}


def _from_text(content: str, parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any] | None:
    read = _from_json(content)
    named = read if isinstance(read, dict) else None
    is_one = len(parameters) == 1 and not any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if is_one and (named is None or not set(named) <= set(parameters)):
        return dict.fromkeys(parameters, content)
    return named


def _from_json(text: str) -> Any:
    """What a text says as JSON, or else the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _expected(parameters: Mapping[str, inspect.Parameter]) -> str:
    return ", ".join(f'"{name}"' for name in parameters) or "no arguments: {}"


def _converted(tool: Tool, name: str, value: Any, hint: Any) -> Any:
    """The value in the type that the annotation asks for, if that is a type of JSON, or optional and of one."""
    others = [each for each in get_args(hint) if each is not type(None)]
    if len(others) == 1 and type(None) in get_args(hint):
        return None if value is None else _converted(tool, name, value, others[0])
    kind = get_origin(hint) or hint
    if kind in (list, dict) and isinstance(value, str):
        read = _from_json(value)
        return read if isinstance(read, kind) else value
    if hint not in _READ:
        return value
    read = _from_json(value.strip().lower()) if isinstance(value, str) and hint is not str else value
    if hint is float and type(read) is int:
        return float(read)
    if type(read) is hint:
        return read
    raise ToolError(f"{tool.__name__}: {name} must be {hint.__name__}, not {json.dumps(value)[:80]}")


# -------------------------------------------------------------------------------------------------------------------
# A tool box
# -------------------------------------------------------------------------------------------------------------------


class ToolBox(EnvironmentResponder):
    """The tools that a TRL trainer takes, and optionally a search engine, for a rollout of this package.

    A policy calls a tool with a tag of its name around a JSON object of arguments, `<guess>{"number": 7}</guess>`, or
    around plain text if the tool has one argument, `<guess>7</guess>`. With `protocol=ChatProtocol()`, the chat
    template shows the tools, and a message calls any number of them in the template's format; a message without calls
    ends the trajectory. Functions and methods may be coroutines. The policy is told of wrong arguments and of whatever
    a tool raises, unless the tool is down or too slow: see `EnvironmentResponder`.

    As in TRL, each trajectory has an object of `environment_factory`, whose public methods are tools. Reward functions
    get the objects as `environments`. Searches of all rows are sent together, each query once.

    Args:
        tools: Functions, which must be safe to call from several threads unless `concurrency` is 1.
        environment_factory: A class, or a function without arguments; or several of them by name.
        search: The engine behind the tag `<search>`; a `SearchResponder` sets the number of passages and the retries.
            With a `ChatProtocol`, add `search_tool(engine)` to the `tools` instead.
        protocol: The wording; the `tools` of a `TagProtocol` are replaced.
        timeout_s: Seconds for the calls of one turn; a trajectory whose calls take longer is masked out of the loss.
        concurrency: How many trajectories may make calls at the same time.

    Attributes:
        protocol: The protocol with the tags of all tools, or their schemas. `AgentRollout` reads it.
        shown: The tools that the chat template shows, with a `ChatProtocol`.

    Raises TypeError if a factory's objects have no method `reset`, and ValueError if there is no tool, two have the
    same name, one is called `answer`, or a row's column `environment` names no factory. With a `ChatProtocol`, raises
    what `transformers.utils.get_json_schema` raises for tools without annotations or docstring.
    """

    def __init__(
        self,
        tools: Sequence[Tool] = (),
        environment_factory: Factory | Mapping[str, Factory] | None = None,
        search: SearchBackend | SearchResponder | None = None,
        protocol: TagProtocol | None = None,
        timeout_s: float = TIMEOUT_S,
        concurrency: int = CONCURRENCY,
    ) -> None:
        protocol = protocol or TagProtocol()
        in_messages = isinstance(protocol, ChatProtocol)
        if in_messages and search is not None:
            raise ValueError("search needs tags, which a `ChatProtocol` lacks: add `search_tool(engine)` to the tools")
        several = isinstance(environment_factory, Mapping)
        given: Any = environment_factory if several else {None: environment_factory}
        makers: dict[Any, Any] = {name: partial(RowTools, tools, factory) for name, factory in given.items()}
        super().__init__(makers if several else makers[None], timeout_s, concurrency)
        self._has_objects = {*given.values()} != {None}
        probed = {name: make() for name, make in makers.items()}
        shown = {name: [*each.tools.values()] for name, each in probed.items()}
        self.shown = shown if in_messages else {}
        self._schemas = {name: tuple(map(get_json_schema, tools)) for name, tools in self.shown.items()}
        self._tools = dict.fromkeys(chain.from_iterable(shown.values()))
        self._classes = dict.fromkeys(type(each.object) for each in probed.values())
        names = dict.fromkeys(tool.__name__ for tool in self._tools)
        if search is not None and not isinstance(search, SearchResponder):
            search = SearchResponder(search, protocol)
        self._search: Responder | None = search
        if search is not None:
            if SEARCH in names:
                raise ValueError(f"tools have the names {[*names]}, but {SEARCH!r} is the search engine's")
            names = {SEARCH: None, **names}
        if not names:
            raise ValueError("tools, environment_factory and search name no tool: there must be at least one")
        if isinstance(protocol, ChatProtocol):
            self.protocol = replace(protocol, functions=tuple(chain.from_iterable(self._schemas.values())))
        else:
            self.protocol = replace(protocol, tools=tuple(names))

    @property
    def environments(self) -> Sequence[Any]:  # type: ignore[override]
        """The objects of the last rollout, one per row."""
        return [tools.object for tools in self._environments] if self._has_objects else ()

    def fork(self) -> ToolBox:
        forked = copy.copy(self)
        forked._search = None if self._search is None else self._search.fork()
        return forked

    def open(self, examples: Sequence[Mapping[str, Any]]) -> None:
        super().open(examples)
        if self._search is not None:
            self._search.open(examples)

    def protocol_of(self, row: int, protocol: TagProtocol) -> TagProtocol:
        """Types the arguments of calls with the schemas of the row's own tools, as TRL does."""
        if not isinstance(protocol, ChatProtocol) or not self._schemas:
            return protocol
        return replace(protocol, functions=self._schemas[self.kinds[row]])

    def ask(self, turns: Sequence[RowTurn]) -> list[Future[Reply]]:
        if self._search is None:
            return super().ask(turns)
        searches = [each for each in turns if each.turn.action.kind is ActionKind.SEARCH]
        found = iter(self._search.ask(searches) if searches else ())
        return [next(found) if each in searches else self._ask(each.row, each.turn) for each in turns]

    def _step(self, environment: RowTools, turn: Turn, wait: Wait) -> Reply:
        return environment.step(turn, wait)

    def close(self) -> None:
        super().close()
        if self._search is not None:
            self._search.close()

    @property
    def instructions(self) -> str:
        """A description of the tools for prompts, a line each, from annotations and docstrings.

        Raises what `transformers.utils.get_json_schema` raises for a tool without them.
        """
        lines = [] if self._search is None else [f"<{SEARCH}> {_USE_OF_SEARCH} </{SEARCH}>"]
        return "\n".join([*lines, *map(_instruction, self._tools)])

    @property
    def rewards(self) -> list[Callable[..., Any]]:
        """One reward function for each class of objects with `get_reward`, named after the class, as in TRL.

        They return what `get_reward` returns, which may be None for no reward, and None for objects of other classes
        and if the object's world was down.
        """
        return [_reward_of(each) for each in self._classes if callable(getattr(each, "get_reward", None))]


def _reward_of(kind: Any) -> Callable[..., Any]:
    async def reward(environments: Sequence[Any], trajectory: Sequence[Any], **_: object) -> list[Any]:
        return [
            None
            if type(environment) is not kind or each.stop_reason.is_infrastructure_failure
            else await _value_of(environment.get_reward())
            for environment, each in zip(environments, trajectory, strict=True)
        ]

    reward.__name__ = kind.__name__
    return reward


async def _value_of(reward: Any) -> Any:
    return await reward if inspect.isawaitable(reward) else reward


def _instruction(tool: Tool) -> str:
    """A line that describes a tool in a prompt, from its annotations and its docstring.

    Raises what `transformers.utils.get_json_schema` raises for a function without them.
    """
    schema = get_json_schema(tool)["function"]
    arguments = {
        name: f"{each.get('type', 'any')}: {each.get('description', '')}".rstrip(": ")
        for name, each in schema["parameters"]["properties"].items()
    }
    return f"<{schema['name']}> {json.dumps(arguments)} </{schema['name']}> {schema['description']}"
