"""TRL's tools, which are functions and methods of `environment_factory`'s objects, as an environment."""

from __future__ import annotations

import inspect
import json
import logging
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias, get_args, get_origin, get_type_hints

from transformers.utils.chat_template_utils import get_json_schema

from sorl_trl.rollout.environments.calls import Then
from sorl_trl.rollout.environments.environment import Reply
from sorl_trl.rollout.environments.responder import UNAVAILABLE, call_with, check_signals
from sorl_trl.search.backend import is_down
from sorl_trl.types import ActionKind, StopReason, ToolCall, ToolResult, Turn

logger = logging.getLogger(__name__)

Tool: TypeAlias = "Callable[..., Any]"
_NO_TOOLS = ("reset", "get_reward")
_READ = (str, int, float, bool)


class Unavailable(str):
    """Return it from a tool whose world is down: the trajectory is then masked out of the loss.

    This works in TRL's own tool loop, too, where the policy reads the text. TRL puts `str()` of a tool's result into a
    message, which for this class is the object itself, so that it can be recognized there.
    """

    def __str__(self) -> str:
        return self


def instruction(tool: Tool) -> str:
    """A line that describes a tool in a prompt, from its annotations and its docstring.

    Raises what `transformers.utils.get_json_schema` raises for a function without them.
    """
    schema = get_json_schema(tool)["function"]
    arguments = {
        name: f"{each.get('type', 'any')}: {each.get('description', '')}".rstrip(": ")
        for name, each in schema["parameters"]["properties"].items()
    }
    return f"<{schema['name']}> {json.dumps(arguments)} </{schema['name']}> {schema['description']}"


def methods_of(environment: Any) -> list[Tool]:
    """The tools of an object, ordered by name. They are found in its class, so that no property is evaluated."""
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    return [getattr(environment, name) for name in names if name not in _NO_TOOLS and not name.startswith("_")]


class Caller:
    """Some functions and an object, if a factory makes one, as the `Environment` of a row."""

    def __init__(self, tools: Sequence[Tool], factory: Callable[[], Any] | None) -> None:
        self.inner = None if factory is None else factory()
        if self.inner is not None and not callable(getattr(self.inner, "reset", None)):
            made = type(self.inner).__name__
            raise TypeError(f"the factory made a {made}: TRL's environments have a method `reset`")
        self.tools = named([*tools, *methods_of(self.inner)])
        for name, tool in self.tools.items():
            if inspect.isgeneratorfunction(tool) or inspect.isasyncgenfunction(tool):
                raise TypeError(f"{name} is a generator, but must return what the policy is told")
            for each in inspect.signature(tool).parameters.values():
                if each.kind in (each.POSITIONAL_ONLY, each.VAR_POSITIONAL):
                    raise TypeError(f"{name} takes `{each}` by its place, but a policy gives arguments by name")

    def reset(self, **example: Any) -> Any:
        said = None if self.inner is None else call_with(self.inner.reset, example)
        if isinstance(said, list):
            name = type(self.inner).__name__
            raise TypeError(f"{name}.reset returned content blocks, but a policy that writes tags is told text alone")
        return said

    def step(self, turn: Turn) -> Reply | Awaitable[Any]:
        """Answer a call, or the calls of a message. A message without calls ends the trajectory."""
        if turn.action.kind is not ActionKind.MESSAGE:
            return self._call(turn.action.tool or ActionKind.SEARCH.value, turn.action.content)
        calls = turn.action.calls
        return self._made(iter(calls), ()) if calls else Reply(stop=StopReason.ENVIRONMENT_DONE)

    def _made(self, calls: Iterator[ToolCall], said: tuple[ToolResult, ...]) -> Reply | Awaitable[Any]:
        """Make calls one after another, and return their results after those in `said`."""
        for call in calls:
            reply = self._made_as_by_trl(call)
            if not isinstance(reply, Reply):
                return self._gone_on(reply, calls, said)
            if reply.stop is not None:
                return reply
            said += reply.results
        return Reply(results=said)

    async def _gone_on(
        self, awaited: Awaitable[Reply], calls: Iterator[ToolCall], said: tuple[ToolResult, ...]
    ) -> Reply | Then:
        """Await a call, and make the remaining ones in the row's thread again."""
        reply = await awaited
        return reply if reply.stop is not None else Then(partial(self._made, calls, said + reply.results))

    def _made_as_by_trl(self, call: ToolCall) -> Reply | Awaitable[Reply]:
        """Call a tool with the arguments of a message as they are, and word errors as TRL's tool loop does."""
        name, arguments = call
        tell = partial(_result, name)
        if name not in self.tools:
            return tell({"error": f"Tool {name} not found."})
        tool = self.tools[name]

        def failed(error: BaseException) -> Reply:
            return tell({"error": _said(tool, error, is_policys=not fits(tool, arguments))})

        return _tried(lambda: tool(**arguments), tell, failed)

    def _call(self, name: str, arguments: str) -> Reply | Awaitable[Reply]:
        """Call a tool with the arguments in a tag."""
        if name not in self.tools:
            return Reply(f"error: there is no {name} here, only {', '.join(self.tools)}")
        tool = self.tools[name]

        def failed(error: BaseException) -> Reply:
            return Reply(f"error: {_said(tool, error, is_policys=isinstance(error, WrongArguments))}")

        return _tried(lambda: tool(**read_arguments(tool, arguments)), _text, failed)


def named(tools: Sequence[Tool]) -> dict[str, Tool]:
    """Tools by name. Raises ValueError if two have the same name, and TypeError if one has none."""
    if nameless := [tool for tool in tools if not hasattr(tool, "__name__")]:
        raise TypeError(f"a tool is {nameless[0]!r}, but must be a function or a method, which has a name")
    names = [tool.__name__ for tool in tools]
    if len({*names}) < len(names):
        raise ValueError(f"tools have the names {names}: each must have a name of its own")
    return dict(zip(names, tools, strict=True))


def fits(tool: Tool, arguments: Any) -> bool:
    """Whether a tool takes these arguments, so that whatever it raises is its own error."""
    try:
        inspect.signature(tool).bind(**arguments)
    except TypeError:
        return False
    return True


def _tried(
    make: Callable[[], Any], tell: Callable[[Any], Reply], failed: Callable[[BaseException], Reply]
) -> Reply | Awaitable[Reply]:
    """The reply to a call: what `tell` makes of its result, or `failed` of its error."""
    try:
        result = make()
        return _awaited(result, tell, failed) if inspect.isawaitable(result) else tell(result)
    except (Exception, SystemExit) as error:  # a policy's Python may say `exit()`
        return failed(error)


async def _awaited(
    result: Awaitable[Any], tell: Callable[[Any], Reply], failed: Callable[[BaseException], Reply]
) -> Reply:
    try:
        return tell(await result)
    except (Exception, SystemExit, CancelledError) as error:
        return failed(error)


def _text(result: Any) -> Reply:
    return UNAVAILABLE if isinstance(result, Unavailable) else Reply(str(result))


def _result(name: str, result: Any) -> Reply:
    """The result of one call of a message. A list stays one for reward functions, as in TRL's tool loop."""
    if isinstance(result, Unavailable):
        return UNAVAILABLE
    return Reply(results=(ToolResult(name, str(result), result if isinstance(result, list) else None),))


def _said(tool: Tool, error: BaseException, is_policys: bool) -> str:
    """What the policy is told of an error, unless the tool is down; that error is raised.

    Raises UserMistake for a tool that sets signal handlers, because all its calls would fail.
    """
    if is_down(error):
        raise error
    check_signals(tool.__qualname__, error)
    try:
        said, shown = str(error), repr(error)
    except Exception:  # the exception's own `__str__` or `__repr__` fails
        said = shown = type(error).__name__
    if not is_policys:
        logger.warning("%s raised %s, which is told to the policy", tool.__qualname__, shown)
    return said


class WrongArguments(Exception):
    """The arguments do not fit the method. The message is for the policy."""


def read_arguments(method: Callable[..., Any], said: str) -> dict[str, Any]:
    """The arguments of `method`, from a JSON object as text; plain text works for a single argument.

    Numbers, truth values, lists and dictionaries may be written as text; arguments with other annotations are passed
    unchanged.

    Raises WrongArguments if the arguments do not fit.
    """
    parameters = inspect.signature(method).parameters
    named = _from_text(said, parameters)
    if named is None:
        raise WrongArguments(f"{method.__name__} takes a JSON object with {_expected(parameters)}")
    try:
        inspect.signature(method).bind(**named)
    except TypeError as error:
        raise WrongArguments(f"{method.__name__}: {error}; it takes {_expected(parameters)}") from error
    hints = _hints(method)
    return {name: _converted(method, name, value, hints.get(name)) for name, value in named.items()}


def _hints(method: Callable[..., Any]) -> dict[str, Any]:
    """Type hints; if some names are imported only for type checkers, only the hints in `_READ`."""
    try:
        return get_type_hints(method)
    except NameError:
        plain = {each.__name__: each for each in _READ}
        said = inspect.signature(method).parameters.values()
        return {each.name: plain[each.annotation] for each in said if each.annotation in plain}


def _from_text(content: str, parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any] | None:
    named: dict[str, Any] | None = None
    with suppress(ValueError, RecursionError):
        named = said if isinstance(said := json.loads(content), dict) else None
    is_one = len(parameters) == 1 and not any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    if is_one and (named is None or not set(named) <= set(parameters)):
        return dict.fromkeys(parameters, content)
    return named


def _expected(parameters: Mapping[str, inspect.Parameter]) -> str:
    return ", ".join(f'"{name}"' for name in parameters) or "no arguments: {}"


def _converted(tool: Tool, name: str, value: Any, hint: Any) -> Any:
    """The value in the type that the annotation asks for, if that is a type of JSON, or optional and of one."""
    others = [each for each in get_args(hint) if each is not type(None)]
    if len(others) == 1 and type(None) in get_args(hint):
        return None if value is None else _converted(tool, name, value, others[0])
    kind = get_origin(hint) or hint
    if kind in (list, dict) and isinstance(value, str):
        with suppress(ValueError, RecursionError):
            return said if isinstance(said := json.loads(value), kind) else value
    if hint not in _READ:
        return value
    said = value
    if isinstance(value, str) and hint is not str:
        with suppress(ValueError):
            said = json.loads(value.strip().lower())
    if hint is float and type(said) is int:
        return float(said)
    if type(said) is hint:
        return said
    raise WrongArguments(f"{tool.__name__}: {name} must be {hint.__name__}, not {json.dumps(value)[:80]}")
