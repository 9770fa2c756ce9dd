"""The objects of TRL's `environment_factory` in a rollout of this package: their public methods are its tools."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from sorl_trl.rollout.environments.arguments import WrongArguments, read_arguments
from sorl_trl.rollout.environments.by_tool import tool_of
from sorl_trl.rollout.environments.environment import Reply
from sorl_trl.rollout.environments.responder import CONCURRENCY, DOWN, TIMEOUT_S, EnvironmentResponder, call_with
from sorl_trl.rollout.protocol import TagProtocol
from sorl_trl.types import Turn

logger = logging.getLogger(__name__)

_NO_TOOLS = ("reset", "get_reward")


class TRLEnvironments(EnvironmentResponder):
    """An object of TRL's `environment_factory` for every trajectory.

    ```python
    games = TRLEnvironments(GuessingGame)
    trainer = SOGRPOTrainer(..., reward_funcs=games.reward, rollout_func=AgentRollout(games, games.protocol))
    ```

    As under TRL, `reset` is given the columns of the row's example, and text that it returns is added to the prompt;
    public methods are tools, coroutines too, and reward functions get the objects as `environments`. A policy calls a
    method by a tag of its name, around a JSON object of arguments: `<guess>{"number": 7}</guess>`; plain text will do
    for a method of one argument: `<guess>7</guess>`. Arguments that do not fit, and whatever a method raises, become a
    text to the policy, except for an environment that is down (see `EnvironmentResponder`, also for the arguments).

    Attributes:
        protocol: To be handed to the rollout. Tools are in the order of their names.

    Raises TypeError for a factory whose objects have no method `reset`, ValueError where there is no tool among them,
    or one that is called `answer`.
    """

    def __init__(
        self, factory: Callable[[], Any], timeout_s: float = TIMEOUT_S, concurrency: int = CONCURRENCY
    ) -> None:
        super().__init__(lambda: _Adapter(factory()), timeout_s, concurrency)
        probe = factory()
        if not callable(getattr(probe, "reset", None)):
            raise TypeError(f"the factory made a {type(probe).__name__}: TRL's environments have a method `reset`")
        # Of the class, as TRL does it: an object's properties would be evaluated.
        names = [name for name, _ in inspect.getmembers(type(probe), inspect.isfunction)]
        tools = tuple(name for name in names if name not in _NO_TOOLS and not name.startswith("_"))
        if not tools:
            raise ValueError(f"{type(probe).__name__} has no public method beside `reset`: there is no tool to call")
        self._methods = [getattr(probe, name) for name in tools]
        self.protocol = TagProtocol(tools=tools)

    @property
    def environments(self) -> Sequence[Any]:  # type: ignore[override]
        return [adapter.inner for adapter in self._environments]

    @property
    def instructions(self) -> str:
        """What a prompt may say about the tools, a line each, from the methods' annotations and docstrings.

        Raises what `transformers.utils.get_json_schema` raises for a method without them.
        """
        return "\n".join(_instruction(method) for method in self._methods)

    @staticmethod
    async def reward(environments: Sequence[Any], trajectory: Sequence[Any], **_: object) -> list[float | None]:
        """A reward function: what `get_reward` of each object gives; None where its world was down."""
        return [
            None if each.stop_reason.is_infrastructure_failure else await _value_of(environment.get_reward())
            for environment, each in zip(environments, trajectory, strict=True)
        ]


class _Adapter:
    """One of the objects as an `Environment`."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def reset(self, **example: Any) -> Any:
        said = call_with(self.inner.reset, example)
        if isinstance(said, list):
            name = type(self.inner).__name__
            raise TypeError(f"{name}.reset returned content blocks, but a policy that writes tags is told text alone")
        return said

    def step(self, turn: Turn) -> Reply | Awaitable[Reply]:
        method = getattr(self.inner, tool_of(turn.action))
        try:
            result = method(**read_arguments(method, turn.action.content))
        except Exception as error:
            return self._failed(method, error)
        return self._awaited(method, result) if inspect.isawaitable(result) else Reply(str(result))

    async def _awaited(self, method: Callable[..., Any], result: Awaitable[Any]) -> Reply:
        try:
            return Reply(str(await result))
        except Exception as error:
            return self._failed(method, error)

    def _failed(self, method: Callable[..., Any], error: Exception) -> Reply:
        """As TRL has it, whose environments talk to the policy by exceptions; but one that is down is down."""
        if isinstance(error, DOWN):
            raise error
        if not isinstance(error, WrongArguments):
            logger.warning("%s raised %r, which is told to the policy", method.__qualname__, error)
        return Reply(f"error: {error}")


def _instruction(method: Callable[..., Any]) -> str:
    schema = get_json_schema(method)["function"]
    arguments = {
        name: f"{each.get('type', 'any')}: {each.get('description', '')}".rstrip(": ")
        for name, each in schema["parameters"]["properties"].items()
    }
    return f"<{schema['name']}> {json.dumps(arguments)} </{schema['name']}> {schema['description']}"


async def _value_of(reward: Any) -> float:
    return float(await reward if inspect.isawaitable(reward) else reward)
