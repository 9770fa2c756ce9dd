"""A method is five pieces, each a pure function of a rollout or of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

from torch import Tensor

from sorl_trl.methods.credit import GroupMean
from sorl_trl.methods.data import Metrics, MicroBatch, Objective, ScoredRollout
from sorl_trl.methods.surrogate import PPOMin
from sorl_trl.ops import TurnLayout

Credit: TypeAlias = Callable[[ScoredRollout], Tensor | None]
"""Gives (N, K) advantages of turns, or None for TRL's own."""
Keep: TypeAlias = Callable[[ScoredRollout], Tensor]
"""Gives (N,) trajectories or (N, T) tokens, bool, that stay in the loss and in what it divides by."""
Weight: TypeAlias = Callable[[Tensor, TurnLayout], Tensor]
"""Gives (B, T) weights from d = log π_old − log μ (B, T) and the turns: the correction of the engine's mismatch."""
Surrogate: TypeAlias = Callable[[MicroBatch], Objective]
"""Gives the objective of each token, and where its gradient is stopped."""
Term: TypeAlias = Callable[[MicroBatch], tuple[Tensor, Metrics]]
"""Gives a mean over the trajectories of the micro-batch, which is added to the loss, and metrics."""


@dataclass(frozen=True)
class Method:
    """How a rollout becomes advantages, and advantages become a loss.

    A piece is any function of the right arguments. Those of this package are frozen dataclasses, so that what a piece
    needs to know is a field of the piece: `Method(terms=(ClipPenalty(coef=1.0),))`.
    """

    credit: Credit = field(default_factory=GroupMean)
    """Who gets which advantage."""
    keep: tuple[Keep, ...] = ()
    """What is trained on: everything that all of them keep."""
    weight: Weight | None = None
    """How the mismatch between trainer and engine is corrected; None leaves it to TRL's options."""
    surrogate: Surrogate = field(default_factory=PPOMin)
    """What is maximised, and what is clipped."""
    terms: tuple[Term, ...] = ()
    """What is added to the loss."""
    name: str = field(default="", compare=False)
    """What trackers call it: that of `METHODS`, or yours."""

    def __post_init__(self) -> None:
        for name in ("keep", "terms"):
            pieces = getattr(self, name)
            if not isinstance(pieces, tuple):
                raise ValueError(f"`{name}` is {pieces!r}, but must be a tuple of functions.")
        for name, piece in self.pieces():
            if not callable(piece):
                raise ValueError(f"`{name}` has {piece!r}, but must be a function: see `sorl_trl.methods`.")

    def pieces(self) -> list[tuple[str, Any]]:
        """Every piece that is there, with the name of its field."""
        found = []
        for each in fields(self)[:-1]:
            value = getattr(self, each.name)
            several = value if isinstance(value, tuple) else () if value is None else (value,)
            found += [(each.name, piece) for piece in several]
        return found

    def describe(self) -> str:
        """One line: the pieces with their arguments."""
        return ", ".join(f"{name}: {piece_name(piece)}" for name, piece in self.pieces())


def piece_name(piece: Any) -> str:
    """A piece as it is shown: a dataclass with its fields, a function by its name."""
    return getattr(piece, "__name__", None) or repr(piece)
