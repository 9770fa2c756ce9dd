"""How far a trajectory may go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from sorl_trl.checks import COUNT, POSITIVE_COUNT, Checked, OneOf

LongObservation = Literal["truncate", "stop"]
LONG_OBSERVATION = OneOf(get_args(LongObservation))


@dataclass(frozen=True)
class RolloutLimits(Checked):
    """The limits of one trajectory, in turns and in tokens. The defaults are those of Search-R1's `train_ppo.sh`.

    Raises ValueError for a limit out of range.
    """

    max_turns: Annotated[int, COUNT] = 2
    """Turns that may search or go wrong. One last generation, which cannot search, follows them; with 0 it is all."""
    max_turn_tokens: Annotated[int, POSITIVE_COUNT] = 500
    max_observation_tokens: Annotated[int, POSITIVE_COUNT] = 500
    """Tokens of an observation, its frame included."""
    max_trajectory_tokens: Annotated[int, POSITIVE_COUNT] = 2500
    """Tokens after the prompt, observations included. The default lets every turn and observation be full."""
    top_k: Annotated[int, POSITIVE_COUNT] = 3
    """Passages per query."""
    on_long_observation: Annotated[LongObservation, LONG_OBSERVATION] = "truncate"
    """Cut a long observation, or end the trajectory before it with `StopReason.OBSERVATION_LIMIT`."""
