"""The data that travels between search, rollout, rewards and trainers. Frozen, and free of any dependency."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple


class StopReason(str, Enum):
    """Why a trajectory ended. Its value is what metrics and files show."""

    ANSWERED = "answered"
    """The policy closed an answer."""
    MAX_TURNS = "max_turns"
    """All turns with a search were used up, and the last generation, without search, gave no answer."""
    TURN_LIMIT = "turn_limit"
    """One turn reached `max_turn_tokens` before it closed an action."""
    TRAJECTORY_LIMIT = "trajectory_limit"
    """`max_trajectory_tokens` leaves no room for the next turn or observation."""
    CONTEXT_LIMIT = "context_limit"
    """Prompt and trajectory leave no room in what the policy can read at once (the window of the engine or the model).

    Where the prompt alone fills it, the trajectory has no turn, and nothing of it is trained on."""
    ENVIRONMENT_DONE = "environment_done"
    """The environment said that this was all."""
    SEARCH_UNAVAILABLE = "search_unavailable"
    """The search infrastructure was down, retries included. Not the policy's doing: masked out of the loss."""
    ENVIRONMENT_UNAVAILABLE = "environment_unavailable"
    """The environment was down, or did not answer in time. Masked out of the loss too."""

    @property
    def is_infrastructure_failure(self) -> bool:
        """Whether the trajectory says nothing about the policy and must not be trained on."""
        return self in (StopReason.SEARCH_UNAVAILABLE, StopReason.ENVIRONMENT_UNAVAILABLE)


class ActionKind(str, Enum):
    """What a turn asks the environment to do."""

    SEARCH = "search"
    TOOL = "tool"
    """A call of any other tool: `Action.tool` names it."""
    ANSWER = "answer"
    MESSAGE = "message"
    """A whole message, which the environment reads: see `ChatProtocol`."""
    INVALID = "invalid"
    """No well-formed action: the policy gets a corrective observation."""


class ToolCall(NamedTuple):
    """What a message asks of a tool."""

    tool: str
    arguments: Any
    """By name, in what is not broken."""


@dataclass(frozen=True)
class Action:
    """A parsed turn: `content` is the query, what a tool is given, the answer or message, or empty if invalid."""

    kind: ActionKind
    content: str = ""
    tool: str = ""
    """The name of the tool, for `ActionKind.TOOL` alone."""
    calls: tuple[ToolCall, ...] = ()
    """Of a message, in the form of the chat template, where that shows tools."""


@dataclass(frozen=True)
class Passage:
    """One retrieved document. `score` is the engine's own, higher is better, `None` where it gives none."""

    id: str
    title: str
    text: str
    score: float | None = None


class ToolResult(NamedTuple):
    """What a tool said to a call."""

    tool: str
    text: str


@dataclass(frozen=True)
class Turn:
    """The tokens of one generation call, exactly as sampled: `text` is decoded from them, never the reverse."""

    token_ids: tuple[int, ...]
    text: str
    action: Action
    logprobs: tuple[float, ...] | None = None
    """Log-probabilities under the sampling engine, one per token, where it reports them."""
    reward: float | None = None
    """What the environment gave for this turn, if it gives rewards."""
    versions: tuple[int, int] | None = None
    """Of the weights when it was asked for and when it was there, counted in batches, where sampling runs ahead."""


@dataclass(frozen=True)
class Observation:
    """Environment tokens that follow a turn. The policy reads them and is never trained on them."""

    token_ids: tuple[int, ...]
    text: str
    passages: tuple[Passage, ...] = ()
    truncated: bool = False
    """Cut to `max_observation_tokens`."""
    neutralized: int = 0
    """How many control tokens or protocol tags the environment's text tried to bring in."""
    role: str = "tool"
    """Who speaks: a "tool", or the "user"."""
    results: tuple[ToolResult, ...] = ()
    """What the tools said that a message called, as the policy read it."""


@dataclass(frozen=True)
class Trajectory:
    """A prompt, then turns with observations between them, in order. A prompt that leaves no room has no turn."""

    prompt_ids: tuple[int, ...]
    segments: tuple[Turn | Observation, ...]
    stop_reason: StopReason

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(s for s in self.segments if isinstance(s, Turn))

    @property
    def observations(self) -> tuple[Observation, ...]:
        return tuple(s for s in self.segments if isinstance(s, Observation))

    @property
    def answer(self) -> str | None:
        """What the policy answered first: only from a turn it generated, never from an observation."""
        return next((t.action.content for t in self.turns if t.action.kind is ActionKind.ANSWER), None)
