"""How far a trajectory may go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

LongObservation = Literal["truncate", "stop"]


@dataclass(frozen=True)
class RolloutLimits:
    """The limits of one trajectory, in turns and in tokens. The defaults are those of Search-R1's `train_ppo.sh`.

    Raises ValueError for a limit out of range.
    """

    max_turns: int = 2
    """Turns that may search or go wrong. One last generation, which cannot search, follows them; with 0 it is all."""
    max_turn_tokens: int = 500
    max_observation_tokens: int = 500
    """Tokens of an observation, its frame included."""
    max_trajectory_tokens: int = 2500
    """Tokens after the prompt, observations included. The default lets every turn and observation be full."""
    top_k: int = 3
    """Passages per query."""
    on_long_observation: LongObservation = "truncate"
    """Cut a long observation, or end the trajectory before it with `StopReason.OBSERVATION_LIMIT`."""

    def __post_init__(self) -> None:
        if self.max_turns < 0:
            raise ValueError(f"max_turns={self.max_turns} must be at least 0")
        for name in ("max_turn_tokens", "max_observation_tokens", "max_trajectory_tokens", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.on_long_observation not in get_args(LongObservation):
            raise ValueError(
                f"on_long_observation={self.on_long_observation!r} must be one of {get_args(LongObservation)}"
            )
