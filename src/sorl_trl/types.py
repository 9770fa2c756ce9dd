"""The data that search, rollout, rewards and trainers exchange. It is frozen and needs no other package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple


class StopReason(str, Enum):
    """Why a trajectory ended. Its value is what metrics and files show."""

    ANSWERED = "answered"
    """The policy closed an answer."""
    MAX_TURNS = "max_turns"
    """All turns that may search were used, and the last generation, which may not search, gave no answer."""
    TURN_LIMIT = "turn_limit"
    """One turn reached `max_turn_tokens` before it closed an action."""
    TRAJECTORY_LIMIT = "trajectory_limit"
    """`max_trajectory_tokens` leaves no room for the next turn or observation."""
    CONTEXT_LIMIT = "context_limit"
    """Prompt and trajectory fill the window of engine or model: the most that the policy can read at once.

    If the prompt alone fills it, the trajectory has no turn and is not trained on."""
    ENVIRONMENT_DONE = "environment_done"
    """The environment, or the user's agent, ended the trajectory."""
    AGENT_ERROR = "agent_error"
    """The user's agent raised an error, for example on a turn that it could not parse: reward `reward_on_error`."""
    SEARCH_UNAVAILABLE = "search_unavailable"
    """The search was down after all retries. The trajectory is masked out of the loss, as the policy is not at
    fault."""
    ENVIRONMENT_UNAVAILABLE = "environment_unavailable"
    """The environment was down or did not answer in time. The trajectory is also masked out of the loss."""
    NO_CALL = "no_call"
    """The user's agent ended without an answer of the policy, for example because a cache answered. The trajectory is
    also masked out of the loss."""

    @property
    def is_infrastructure_failure(self) -> bool:
        """Whether the trajectory carries no information about the policy and must not be trained on."""
        return self in (StopReason.SEARCH_UNAVAILABLE, StopReason.ENVIRONMENT_UNAVAILABLE, StopReason.NO_CALL)


class ActionKind(str, Enum):
    """What a turn asks the environment to do."""

    SEARCH = "search"
    TOOL = "tool"
    """A call of any other tool: `Action.tool` names it."""
    ANSWER = "answer"
    MESSAGE = "message"
    """A whole message for the environment: see `ChatProtocol`."""
    INVALID = "invalid"
    """No well-formed action; the policy gets a corrective observation."""


class ToolCall(NamedTuple):
    """A call of a tool in a message."""

    tool: str
    arguments: Any
    """The arguments by name, unless the call is broken."""


@dataclass(frozen=True)
class Action:
    """A parsed turn: `content` is the query, a tool's input, the answer or the message, or empty if invalid."""

    kind: ActionKind
    content: str = ""
    tool: str = ""
    """The name of the tool, only for `ActionKind.TOOL`."""
    calls: tuple[ToolCall, ...] = ()
    """The calls of a message, if the chat template shows tools."""


@dataclass(frozen=True)
class Passage:
    """One retrieved document. `score` is the engine's own: higher is better, and `None` means that there is none."""

    id: str
    title: str
    text: str
    score: float | None = None


class ToolResult(NamedTuple):
    """A tool's reply to a call."""

    tool: str
    text: str
    returned: list[Any] | None = None
    """The list that the tool returned, if it returned one; reward functions get it instead of the text."""
    failed: bool = False
    """Whether `text` is an error: the tool raised it, or does not exist."""


@dataclass(frozen=True)
class Turn:
    """The tokens of one generation call, exactly as sampled: `text` is decoded from them, never the reverse."""

    token_ids: tuple[int, ...]
    text: str
    action: Action
    logprobs: tuple[float, ...] | None = None
    """Log-probabilities under the sampling engine, one per token, if it reports them."""
    reward: float | None = None
    """The environment's reward for this turn, if it gives rewards."""
    versions: tuple[int, int] | None = None
    """For asynchronous rollouts: weight versions (in batches) when the turn was requested and when it was complete."""
    agent: str = ""
    """The turn's agent, if there are several: named by the environment, or by an API call's `model`."""
    context: int = 0
    """The context that the turn continues."""
    routes: Any = field(default=None, compare=False, repr=False)
    """What `rollout/routing.py` makes of the engine's report, for the tokens that its context had not read before."""
    resumes: bool = False
    """Whether it continues the turn before it, which tokens of the environment interrupt."""


@dataclass(frozen=True)
class Observation:
    """Environment tokens that follow a turn. The policy reads them and is never trained on them."""

    token_ids: tuple[int, ...]
    text: str
    passages: tuple[Passage, ...] = ()
    truncated: bool = False
    """Whether it was cut to `max_observation_tokens`."""
    neutralized: int = 0
    """How many control tokens or protocol tags the environment's text contained."""
    role: str = "tool"
    """The speaker: "tool" or "user"."""
    results: tuple[ToolResult, ...] = ()
    """The results of the tools that a message called, as the policy read them."""
    context: int = 0
    """The context that it continues or begins."""
    repeats: bool = False
    """Whether it only repeats parts of another context of the trajectory."""


@dataclass(frozen=True)
class Trajectory:
    """A prompt, then turns with observations between them. If the prompt leaves no room, there is no turn.

    A context is what the policy read at once. Context 0 continues the prompt. Each other context begins with
    observations that contain everything read there; those with `repeats` come first. Contexts may alternate.

    Everything after the prompt is the completion. The lists of the token-level view have one entry per token of it.
    """

    prompt_ids: tuple[int, ...]
    segments: tuple[Turn | Observation, ...]
    stop_reason: StopReason
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What the rollout gives reward functions beside the columns of the dataset, by argument name."""

    @property
    def turns(self) -> tuple[Turn, ...]:
        return tuple(s for s in self.segments if isinstance(s, Turn) and not s.resumes)

    @property
    def observations(self) -> tuple[Observation, ...]:
        """The observations with new content, that is, without `repeats`."""
        return tuple(s for s in self.segments if isinstance(s, Observation) and not s.repeats)

    @property
    def replies(self) -> tuple[Observation | None, ...]:
        """For each turn, the first of the `observations` before the next turn, in any context."""
        found: list[Observation | None] = []
        for segment in self.segments:
            if isinstance(segment, Turn):
                found += [None] * (not segment.resumes)
            elif found and not segment.repeats:
                found[-1] = found[-1] or segment
        return tuple(found)

    @property
    def answer(self) -> str | None:
        """The policy's first answer. Only its own turns can give one, never an observation."""
        return next((t.action.content for t in self.turns if t.action.kind is ActionKind.ANSWER), None)

    # ---------------------------------------------------------------------------------------------------------------
    # Token by token
    # ---------------------------------------------------------------------------------------------------------------

    @cached_property
    def completion_ids(self) -> list[int]:
        """Turns and observations in order; empty only for a trajectory without a turn."""
        return [token for segment in self.segments for token in segment.token_ids]

    @cached_property
    def turn_ids(self) -> list[int]:
        """The turn of each token, −1 if the policy is not trained on it: on all, after an infrastructure failure."""
        found: list[int] = []
        turn, is_trained = -1, not self.stop_reason.is_infrastructure_failure
        for segment in self.segments:
            is_turn = isinstance(segment, Turn)
            turn += isinstance(segment, Turn) and not segment.resumes
            found += [turn if is_turn and is_trained else -1] * len(segment.token_ids)
        return found

    @property
    def env_mask(self) -> list[int]:
        """1 on tokens that the policy sampled and is trained on."""
        return [int(turn >= 0) for turn in self.turn_ids]

    @cached_property
    def context_ids(self) -> list[int]:
        """The context of each token, negative where it only repeats another."""
        found: list[int] = []
        for segment in self.segments:
            repeats = isinstance(segment, Observation) and segment.repeats
            found += [-segment.context if repeats else segment.context] * len(segment.token_ids)
        return found

    @property
    def logprobs(self) -> list[float] | None:
        """The sampling engine's log-probabilities, 0.0 on observations; None if a turn has none."""
        found: list[float] = []
        for segment in self.segments:
            own = segment.logprobs if isinstance(segment, Turn) else (0.0,) * len(segment.token_ids)
            if own is None:
                return None
            found += own
        return found

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """For each turn that is trained on, the position of its first token and the position after its last."""
        first: dict[int, int] = {}
        end: dict[int, int] = {}
        for position, turn in enumerate(self.turn_ids):
            if turn >= 0:
                first.setdefault(turn, position)
                end[turn] = position + 1
        return [(first[turn], end[turn]) for turn in first]

    @property
    def agents(self) -> list[str]:
        """The agent of each of these turns, "" if it has none."""
        return [turn.agent for turn in self.turns] if self.spans else []

    def read_before(self, position: int) -> list[int]:
        """The tokens that the policy had read, in order, when it wrote the token at `position`."""
        context = abs(self.context_ids[position])
        before = zip(self.completion_ids[:position], self.context_ids[:position], strict=True)
        return [*(() if context else self.prompt_ids), *(token for token, own in before if abs(own) == context)]

    def shown(self, start: int = 0, end: int | None = None) -> list[int]:
        """The tokens in a range without those that only repeat others."""
        tokens = zip(self.completion_ids[start:end], self.context_ids[start:end], strict=True)
        return [token for token, context in tokens if context >= 0]
