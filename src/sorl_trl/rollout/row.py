"""A trajectory under way, and the limits that end it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from sorl_trl.rollout.generation import Generation
from sorl_trl.rollout.options import RolloutLimits
from sorl_trl.types import Action, ActionKind, Observation, StopReason, Trajectory, Turn


@dataclass
class Row:
    """What one row of a rollout has read and written so far."""

    index: int
    prompt_ids: tuple[int, ...]
    limits: RolloutLimits
    window: int | None
    """How many tokens the policy can read; None for no limit."""
    context: list[int] = field(init=False)
    """The prompt and all segments so far, from which the next turn is generated."""
    segments: list[Turn | Observation] = field(default_factory=list)
    turns: int = 0
    stop_reason: StopReason | None = None

    def __post_init__(self) -> None:
        self.context = list(self.prompt_ids)

    @property
    def last_turn(self) -> Turn:
        """The turn just taken; an observation never ends a row that waits for its reply."""
        last = self.segments[-1]
        assert isinstance(last, Turn)
        return last

    @property
    def budget(self) -> int:
        """How many tokens the next turn may have; below 1 if there is no room for one."""
        return min(self.limits.max_turn_tokens, self._room()[0])

    def take_turn(self, generation: Generation, text: str, action: Action) -> None:
        """Append a turn, and set the stop reason if the row ends here."""
        room, reason = self._room()
        self._append(Turn(generation.token_ids, text, action, generation.logprobs, versions=generation.versions))
        self.turns += 1
        if action.kind is ActionKind.ANSWER:
            self.stop_reason = StopReason.ANSWERED
        elif action.kind in (ActionKind.INVALID, ActionKind.MESSAGE) and not generation.stopped:
            self.stop_reason = reason if room < self.limits.max_turn_tokens else StopReason.TURN_LIMIT
        elif self.turns > self.limits.max_turns:
            self.stop_reason = StopReason.MAX_TURNS

    def observe(self, observation: Observation) -> None:
        """Append the reply to the last turn, or end the row if no turn could follow it."""
        room, reason = self._room()
        if len(observation.token_ids) >= room:  # not a single token of the next turn would fit after it
            self.stop_reason = reason
        else:
            self._append(observation)

    def finished(self) -> Trajectory:
        assert self.stop_reason is not None
        return Trajectory(self.prompt_ids, tuple(self.segments), self.stop_reason)

    def _append(self, segment: Turn | Observation) -> None:
        self.segments.append(segment)
        self.context.extend(segment.token_ids)

    def _room(self) -> tuple[int, StopReason]:
        """How many tokens the trajectory has left, and the stop reason when they are used up."""
        most = self.limits.max_trajectory_tokens
        left = (sys.maxsize if most is None else most) - (len(self.context) - len(self.prompt_ids))
        if self.window is not None and self.window - len(self.context) < left:
            return self.window - len(self.context), StopReason.CONTEXT_LIMIT
        return left, StopReason.TRAJECTORY_LIMIT
