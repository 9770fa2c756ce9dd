"""Several tools of one protocol: TRL's functions and environments, a search engine, and whatever else answers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from sorl_trl.rollout.environments.environment import Reply, Responder, RowTurn, tool_of
from sorl_trl.rollout.environments.responder import CONCURRENCY, TIMEOUT_S
from sorl_trl.rollout.environments.search import SearchResponder
from sorl_trl.rollout.environments.tools import Tool, ToolResponder, instruction
from sorl_trl.rollout.protocol import TagProtocol
from sorl_trl.search import SearchBackend
from sorl_trl.types import ActionKind

SEARCH = ActionKind.SEARCH.value
_USE_OF_SEARCH = "a search query; passages are then shown to you"


class ByTool(Responder):
    """Has each turn answered by the responder of the tool that it calls; all that call one tool are asked together.

    ```python
    ByTool({"search": SearchResponder(index), "move": EnvironmentResponder(Maze), "look": ...})
    ```

    One responder may answer several tools: then their state is one. What several say in greeting is joined, line by
    line; `environments` are those of the first responder that has some.

    Args:
        responders: By the tools that they answer.
        protocol: How things are worded; its `tools` are replaced by the names of `responders`.

    Raises ValueError for no responder at all, and for a name that is no tag; TypeError for an object that is none.
    """

    def __init__(self, responders: Mapping[str, Responder], protocol: TagProtocol | None = None) -> None:
        if not responders:
            raise ValueError("responders is empty: it must name at least one tool")
        for name, responder in responders.items():
            if not isinstance(responder, Responder):
                raise TypeError(f"responders[{name!r}] is a {type(responder).__name__}, but must be a `Responder`")
        self.protocol: TagProtocol = replace(protocol or TagProtocol(), tools=tuple(responders))
        self._responders = dict(responders)
        self._distinct = list({id(each): each for each in responders.values()}.values())

    @property
    def environments(self) -> Sequence[Any]:  # type: ignore[override]
        return next((each.environments for each in self._distinct if each.environments), ())

    def greet(self, examples: Sequence[Mapping[str, Any]]) -> Sequence[str | None]:
        """See `Responder.greet`."""
        said = zip(*(each.greet(examples) for each in self._distinct), strict=True)
        return ["\n".join(filter(None, texts)) or None for texts in said]

    def open(self, examples: Sequence[Mapping[str, Any]]) -> None:
        """See `Responder.open`."""
        for each in self._distinct:
            each.open(examples)

    def ask(self, turns: Sequence[RowTurn]) -> list[Future[Reply]]:
        """See `Responder.ask`. Raises ValueError for a tool without a responder."""
        places: dict[int, list[int]] = {}
        for place, each in enumerate(turns):
            name = tool_of(each.turn.action)
            if name not in self._responders:
                raise ValueError(f"nobody answers the tool {name!r}: there are {sorted(self._responders)}")
            places.setdefault(id(self._responders[name]), []).append(place)
        replies: dict[int, Future[Reply]] = {}
        for responder in self._distinct:
            asked = places.get(id(responder), [])
            replies |= zip(asked, responder.ask([turns[place] for place in asked]) if asked else (), strict=True)
        return [replies[place] for place in range(len(turns))]

    def close(self) -> None:
        """See `Responder.close`."""
        for each in self._distinct:
            each.close()


class ToolBox(ByTool):
    """The tools that a TRL trainer takes, for a rollout of this package; and a search engine, if there is one.

    ```python
    tools = ToolBox([convert], environment_factory=GuessingGame, timeout_s=30.0)
    trainer = SOGRPOTrainer(..., reward_funcs=tools.reward, rollout_func=AgentRollout(tools))
    ```

    A policy calls a tool by a tag of its name, around a JSON object of arguments: `<guess>{"number": 7}</guess>`;
    plain text will do for a tool of one argument: `<guess>7</guess>`. Functions and methods may be coroutines.
    Arguments that do not fit, and whatever a tool raises, become a text to the policy, except for a tool that is down:
    see `EnvironmentResponder`, also for the time limit.

    As under TRL, each trajectory has an object of `environment_factory`, whose public methods are tools; its `reset`
    is given the columns of the row's example, and text that it returns is added to the prompt. Reward functions get
    the objects as `environments`. Searches of all rows go out together, each query once.

    Args:
        tools: Functions, which must be safe to call from several threads unless `concurrency` is 1.
        environment_factory: A class, or a function without arguments.
        search: Behind the tag `<search>`; a `SearchResponder` says how many passages there are, and how patient it is.
        protocol: How things are worded; its `tools` are replaced.
        timeout_s: For one call; a trajectory whose call takes longer is masked out of the loss.
        concurrency: Trajectories whose calls may go on at the same time.

    Attributes:
        protocol: With the tags of all tools. `AgentRollout` reads it.

    Raises TypeError for a factory whose objects have no method `reset`; ValueError where there is no tool, where two
    have one name, and for one that is called `answer`.
    """

    def __init__(
        self,
        tools: Sequence[Tool] = (),
        environment_factory: Callable[[], Any] | None = None,
        search: SearchBackend | SearchResponder | None = None,
        protocol: TagProtocol | None = None,
        timeout_s: float = TIMEOUT_S,
        concurrency: int = CONCURRENCY,
    ) -> None:
        responders: dict[str, Responder] = {}
        if search is not None:
            if not isinstance(search, SearchResponder):
                search = SearchResponder(search, replace(protocol or TagProtocol(), tools=(SEARCH,)))
            responders[SEARCH] = search
        own = ToolResponder(tools, environment_factory, timeout_s, concurrency)
        if clash := own.tools.keys() & responders.keys():
            raise ValueError(f"tools have the names {[*own.tools]}, but {clash} is the search engine's")
        self._tools = own.tools
        super().__init__({**responders, **dict.fromkeys(own.tools, own)}, protocol)

    @property
    def instructions(self) -> str:
        """What a prompt may say about the tools, a line each, from annotations and docstrings.

        Raises what `transformers.utils.get_json_schema` raises for a tool without them.
        """
        has_engine = SEARCH in self.protocol.tools and SEARCH not in self._tools
        lines = [f"<{SEARCH}> {_USE_OF_SEARCH} </{SEARCH}>"] if has_engine else []
        return "\n".join([*lines, *map(instruction, self._tools.values())])

    @staticmethod
    async def reward(environments: Sequence[Any], trajectory: Sequence[Any], **_: object) -> list[float | None]:
        """A reward function: what `get_reward` of each object gives; None where its world was down."""
        return [
            None if each.stop_reason.is_infrastructure_failure else await _value_of(environment.get_reward())
            for environment, each in zip(environments, trajectory, strict=True)
        ]


async def _value_of(reward: Any) -> float:
    return float(await reward if inspect.isawaitable(reward) else reward)
