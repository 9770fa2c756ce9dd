"""What answers the policy's turns: an environment for each trajectory, or a responder for all."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, SupportsFloat

from sorl_trl.rollout.protocol import TagProtocol
from sorl_trl.types import Passage, StopReason, ToolResult, Trajectory, Turn

THREAD = "sorl-environment"
"""The name of the threads in which environments and searches are called."""
_STOPS = (StopReason.ENVIRONMENT_DONE, StopReason.ENVIRONMENT_UNAVAILABLE, StopReason.SEARCH_UNAVAILABLE)


@dataclass(frozen=True)
class Reply:
    """The environment's reply to a turn.

    `text` is untrusted: the rollout sanitizes it, cuts it to `max_observation_tokens` and frames it. A reply with a
    `stop` ends the trajectory, and its text is ignored.

    Raises TypeError if `text` is not a string, and ValueError if `reward` is not finite, `stop` is not a reason of the
    environment (`ENVIRONMENT_DONE`, or that it is down), or `role` is neither "tool" nor "user".
    """

    text: str = ""
    passages: tuple[Passage, ...] = ()
    """The passages that `text` shows, if any, for records and statistics."""
    reward: float | None = None
    """The reward of this turn (`Turn.reward`)."""
    stop: StopReason | None = None
    role: str = "tool"
    """The speaker. A "user" in the middle of a trajectory requires a `ChatProtocol`."""
    results: tuple[ToolResult, ...] = ()
    """What several tools return, instead of `text`: messages of a chat template with tools, for a `ChatProtocol`."""

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"text={self.text!r} must be a string")
        if self.role not in ("tool", "user"):
            raise ValueError(f"role={self.role!r} must be 'tool' or 'user'")
        if self.reward is not None and not (isinstance(self.reward, SupportsFloat) and math.isfinite(self.reward)):
            raise ValueError(f"reward={self.reward!r} must be a finite number")
        if self.stop is not None and self.stop not in _STOPS:
            raise ValueError(f"stop={self.stop!r} must be None or one of {[str(reason) for reason in _STOPS]}")


class Environment(Protocol):
    """The world of one trajectory. Every trajectory has its own object, so state is not shared.

    `step` may be a coroutine and may take long, because other trajectories continue meanwhile. It gets a turn with the
    action that the protocol parsed (`turn.action`). If the world is down, raise `SearchUnavailable`, `ConnectionError`
    or `TimeoutError`, or do not catch a client's error that one of them caused: the trajectory is then masked out of
    the loss. Any other exception is a programming error and ends the run.

    Two methods are optional. `reset` gets the dataset columns named by its parameters, and may return text for the end
    of the prompt. `measures` is called after the rollout, in the rollout's thread, and returns numbers by name, which
    are averaged over trajectories and logged. `EnvironmentResponder` makes one environment per trajectory.

    If several agents share the policy, the optional attribute `agent` names the agent that acts next: `reset` sets the
    first, and `step` the following ones.
    """

    def step(self, turn: Turn) -> Reply | Awaitable[Reply]:
        """Answer a turn that calls a tool, or any message. Answers and invalid turns are never passed."""
        ...


@dataclass(frozen=True)
class ResponderRow:
    """What a responder tells of one trajectory."""

    greeting: str | None = None
    """The text to add to its prompt, untrusted like all environment text."""
    kind: str | None = None
    """The name of its environment, if there are several."""
    environment: Any = None
    """What answers its turns, if every row has its own object."""
    tools: tuple[dict[str, Any], ...] | None = None
    """JSON schemas of the tools that the chat template shows in its prompt, if turns call such tools."""

    @property
    def agent(self) -> str:
        """The agent that acts next, "" if there is only one."""
        return getattr(self.environment, "agent", "")

    def measures(self) -> Mapping[str, float]:
        """The environment's measures by name, once the trajectory has ended."""
        measures = getattr(self.environment, "measures", None)
        return (measures() or {}) if callable(measures) else {}


class Responder(ABC):
    """Answers the turns of all rows of a rollout, while the engine continues.

    Attributes:
        rows: What `open` returned, kept until the next rollout begins.
        environments: An object per row of the last rollout, for reward functions; may be empty.
        protocol: The protocol for the policy's actions, if it has its own.
    """

    rows: Sequence[ResponderRow] = ()
    environments: Sequence[Any] = ()
    protocol: TagProtocol | None = None

    def fork(self) -> Responder:
        """A shallow copy for another rollout, which may run at the same time.

        `open` and `close` must therefore assign new attributes instead of changing them in place.
        """
        return copy.copy(self)

    def open(self, examples: Sequence[Mapping[str, Any]]) -> Sequence[ResponderRow]:
        """Begin a rollout, with one example per row: its `prompt` and the columns of the dataset."""
        self.rows = [ResponderRow()] * len(examples)
        return self.rows

    @abstractmethod
    def ask(self, turns: Mapping[int, Turn]) -> Mapping[int, Future[Reply]]:
        """Start answering turns, by row, without waiting. The rollout never has two turns of a row open at once."""

    def close(self) -> None:
        """End the rollout, without waiting for pending answers."""


def environment_statistics(trajectories: Sequence[Trajectory], responder: Responder) -> dict[str, float]:
    """Means over trajectories of their environments' measures, for each kind of environment if there are several.

    They include the `reward` if the environment gives rewards and, with several kinds, the number of `turns`.
    Trajectories ended by an infrastructure failure are left out.
    """
    found: dict[str, list[float]] = {}
    for row, trajectory in zip(responder.rows, trajectories, strict=True):
        if trajectory.stop_reason.is_infrastructure_failure:
            continue
        kind = row.kind
        rewards = [turn.reward for turn in trajectory.turns if turn.reward is not None]
        figures = {**row.measures(), **({"reward": sum(rewards)} if rewards else {})}
        for name, value in (figures if kind is None else {**figures, "turns": len(trajectory.turns)}).items():
            if value is not None:
                found.setdefault(name if kind is None else f"{kind}/{name}", []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}
