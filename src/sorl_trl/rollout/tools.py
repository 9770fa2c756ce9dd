"""Tools as TRL's trainers take them, functions and the methods of objects, and what comes with them."""

from __future__ import annotations

import inspect
import logging
from asyncio import CancelledError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

from transformers.utils.chat_template_utils import get_json_schema

from sorl_trl.checks import POSITIVE_COUNT
from sorl_trl.rollout.environment import Reply, ResponderRow
from sorl_trl.rollout.observation import is_image
from sorl_trl.rollout.protocol import ChatProtocol, TagProtocol
from sorl_trl.rollout.responder import CONCURRENCY, TIMEOUT_S, UNAVAILABLE, EnvironmentResponder, Wait
from sorl_trl.rollout.search_responder import SearchResponder
from sorl_trl.search import RetryPolicy, SearchBackend, SearchUnavailable
from sorl_trl.search.backend import is_down
from sorl_trl.types import ActionKind, StopReason, ToolResult, Turn

logger = logging.getLogger(__name__)

Tool: TypeAlias = "Callable[..., Any]"
Factory: TypeAlias = "Callable[[], Any]"
_NOT_TOOLS = ("reset", "get_reward")


def call_tool(tools: Mapping[str, Tool], name: str, arguments: Any, wait: Wait) -> ToolResult | None:
    """The result of a call, for the policy; None if the tool is down.

    Any other error is text for the policy, in TRL's wording, even `SystemExit`, because policy-written Python may call
    `exit()`. Raises TypeError for images, which the policy would not see.
    """
    if name not in tools:
        return _failure(name, f"Tool {name} not found.")
    tool = tools[name]
    try:
        result = wait(tool(**arguments))
        text = str.__str__(str(result))  # without any subclass of `str`
    except (Exception, SystemExit, CancelledError) as error:
        called = getattr(tool, "__qualname__", name)
        if is_down(error):
            logger.warning("%s is unavailable, a trajectory is masked: %r", called, error)
            return None
        if _fits(tool, arguments):  # otherwise it is the policy's error
            logger.warning("%s raised %r, which is passed to the policy", called, error)
        return _failure(name, str(error))
    returned = result if isinstance(result, list) else None
    if any(map(is_image, returned or ())):
        raise TypeError(f"the tool {name!r} returned an image, which the policy would not see: return text")
    return ToolResult(name, text, returned)


def _failure(name: str, error: str) -> ToolResult:
    return ToolResult(name, str({"error": error}), failed=True)


def _fits(tool: Tool, arguments: Any) -> bool:
    """Whether a tool accepts these arguments, so that any error is the tool's own."""
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
            raise TypeError(f"the factory made a {made}, but TRL's environments must have a method `reset`")
        self.tools = named([*tools, *methods_of(self.object)])

    def step(self, turn: Turn, wait: Wait) -> Reply:
        """Answer the calls of a message in order. A message without calls ends the trajectory."""
        results = []
        for name, arguments in turn.action.calls:
            result = call_tool(self.tools, name, arguments, wait)
            if result is None:
                return UNAVAILABLE
            results.append(result)
        return Reply(results=tuple(results)) if results else Reply(stop=StopReason.ENVIRONMENT_DONE)


def methods_of(environment: Any) -> list[Tool]:
    """The tools of an object, ordered by name. They are looked up in its class, so no property is evaluated."""
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    return [getattr(environment, name) for name in names if name not in _NOT_TOOLS and not name.startswith("_")]


def named(tools: Sequence[Tool]) -> dict[str, Tool]:
    """Tools by name. Raises ValueError if two have the same name, and TypeError if one has no name."""
    if nameless := [tool for tool in tools if not hasattr(tool, "__name__")]:
        raise TypeError(f"a tool is {nameless[0]!r}, but must be a function or method with a name")
    names = [tool.__name__ for tool in tools]
    if len({*names}) < len(names):
        raise ValueError(f"tools have the names {names}, but each must have a different name")
    return dict(zip(names, tools, strict=True))


class ToolBox(EnvironmentResponder):
    """The tools that a TRL trainer takes, for a rollout of this package.

    The chat template shows the tools, and a message of the policy calls any number of them in the template's format; a
    message without calls ends the trajectory. Functions and methods may be coroutines. The policy reads the error for
    wrong arguments and for anything that a tool raises, unless the tool is down or too slow: see
    `EnvironmentResponder`.

    As in TRL, each trajectory has an object made by `environment_factory`, and the object's public methods are tools.
    Reward functions get the objects as `environments`.

    Args:
        tools: Functions, which must be safe to call from several threads unless `concurrency` is 1. For a search
            engine, add `search_tool(engine)`.
        environment_factory: A class, or a function without arguments; or several of them by name.
        timeout_s: Seconds for the calls of one turn; a trajectory whose calls take longer is masked out of the loss.
        concurrency: How many trajectories may make calls at the same time.

    Attributes:
        has_objects: Whether each trajectory has an object, whose `reset` may write the whole prompt.
        protocol: A `ChatProtocol` with the schemas of all tools. `AgentRollout` reads it.

    Raises TypeError if a factory's objects have no method `reset`; ValueError if there is no tool, two have the same
    name, or a row's column `environment` does not name a factory; and the errors of
    `transformers.utils.get_json_schema` for tools without annotations or docstring.
    """

    def __init__(
        self,
        tools: Sequence[Tool] = (),
        environment_factory: Factory | Mapping[str, Factory] | None = None,
        timeout_s: float = TIMEOUT_S,
        concurrency: int = CONCURRENCY,
    ) -> None:
        several = isinstance(environment_factory, Mapping)
        given: Any = environment_factory if several else {None: environment_factory}
        makers: dict[Any, Any] = {name: partial(RowTools, tools, factory) for name, factory in given.items()}
        super().__init__(makers if several else makers[None], timeout_s, concurrency)
        self.has_objects = {*given.values()} != {None}
        probed = {name: make() for name, make in makers.items()}
        self._classes = dict.fromkeys(type(each.object) for each in probed.values())
        self._schemas = {name: tuple(map(get_json_schema, each.tools.values())) for name, each in probed.items()}
        if not any(self._schemas.values()):
            raise ValueError("`tools` and `environment_factory` have no tool, but there must be at least one")
        self.protocol = ChatProtocol(functions=tuple(chain.from_iterable(self._schemas.values())))

    def open(self, examples: Sequence[Mapping[str, Any]]) -> Sequence[ResponderRow]:
        rows = super().open(examples)
        self.rows = [replace(row, tools=self._schemas[row.kind]) for row in rows]
        self.environments = [row.environment.object for row in rows] if self.has_objects else ()
        return self.rows

    def _step(self, environment: RowTools, turn: Turn, wait: Wait) -> Reply:
        return environment.step(turn, wait)

    @property
    def rewards(self) -> list[Callable[..., Any]]:
        """One reward function for each class of objects with `get_reward`, named after the class, as in TRL.

        They return the result of `get_reward`, which may be None for no reward. For objects of other classes, or if
        the object's world was down, they return None.
        """
        return [_reward_of(each) for each in self._classes if callable(getattr(each, "get_reward", None))]


def _reward_of(kind: Any) -> Callable[..., Any]:
    async def reward(environments: Sequence[Any], trajectory: Sequence[Any], **_: object) -> list[Any]:
        rewards = []
        for environment, each in zip(environments, trajectory, strict=True):
            is_judged = type(environment) is kind and not each.stop_reason.is_infrastructure_failure
            value = environment.get_reward() if is_judged else None
            rewards.append(await value if inspect.isawaitable(value) else value)
        return rewards

    reward.__name__ = kind.__name__
    return reward


def search_tool(backend: SearchBackend, k: int = 3, retry: RetryPolicy | None = None) -> Callable[[str], str]:
    """A search engine as a tool, `tools=[search_tool(backend)]`, that returns at most `k` passages per query.

    It returns what `SearchRollout` puts between its tags: the best passages, or a note that there are none or that the
    query was refused. If the engine is down after all retries, it raises SearchUnavailable; this package's trainers
    then mask the trajectory, whereas `trl.GRPOTrainer` trains on it. It queries the engine as `SearchRollout` does:
    calls that come while the engine is busy share the next one.

    Raises ValueError if `k` is below 1.
    """
    POSITIVE_COUNT.check("k", k)
    responder = SearchResponder(backend, top_k=k, retry=retry)

    def search(query: str) -> str:
        """
        Search a collection of passages.

        Args:
            query: What to look for, in a few words.

        Returns:
            The passages that fit best, each with its title.
        """
        (future,) = responder.find([query])
        if (reply := future.result()).stop is not None:
            raise SearchUnavailable("the search engine is unavailable")
        return reply.text

    return search


def answer_in_messages(completion: Sequence[Mapping[str, Any]]) -> str | None:
    """The answer in the first assistant message that gives one, or None. Tool messages do not count.

    For reward functions of trainers with `tools` or `environment_factory`, because TRL then passes each completion as
    a list of messages. `TagProtocol.parse` finds the answer, as for `SearchRollout`: the first closing tag of a
    message decides. With `SearchRollout`, read `Trajectory.answer` instead, because its completions include the
    observations.

    Raises TypeError if the completion is a plain string.
    """
    if isinstance(completion, str):
        raise TypeError(f"completion is the string {completion[:80]!r}, but must be a list of messages")
    texts = [message.get("content") or "" for message in completion if message["role"] == "assistant"]
    actions = map(TagProtocol().parse, texts)
    return next((action.content for action in actions if action.kind is ActionKind.ANSWER), None)
