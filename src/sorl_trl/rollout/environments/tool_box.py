"""Tools for one rollout: TRL's functions and environments, and a search engine."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

from transformers.utils.chat_template_utils import get_json_schema

from sorl_trl.rollout.chat_protocol import ChatProtocol
from sorl_trl.rollout.environments.environment import Reply, Responder, RowTurn
from sorl_trl.rollout.environments.responder import CONCURRENCY, TIMEOUT_S, EnvironmentResponder
from sorl_trl.rollout.environments.search import SearchResponder
from sorl_trl.rollout.environments.tools import Caller, Tool, instruction
from sorl_trl.rollout.protocol import TagProtocol
from sorl_trl.search import SearchBackend
from sorl_trl.types import ActionKind

Factory: TypeAlias = "Callable[[], Any]"
SEARCH = ActionKind.SEARCH.value
_USE_OF_SEARCH = "a search query; passages are then shown to you"


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
        callers = {name: partial(Caller, tools, factory) for name, factory in given.items()}
        super().__init__(callers if several else callers[None], timeout_s, concurrency)
        self._has_objects = {*given.values()} != {None}
        probed = {name: caller() for name, caller in callers.items()}
        shown = {name: [*caller.tools.values()] for name, caller in probed.items()}
        self.shown = shown if in_messages else {}
        self._schemas = {name: tuple(map(get_json_schema, tools)) for name, tools in self.shown.items()}
        self._tools = dict.fromkeys(chain.from_iterable(shown.values()))
        self._classes = dict.fromkeys(type(caller.inner) for caller in probed.values())
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
        return [caller.inner for caller in self._environments] if self._has_objects else ()

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
        return "\n".join([*lines, *map(instruction, self._tools)])

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
