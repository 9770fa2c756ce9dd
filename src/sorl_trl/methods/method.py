"""A method, which consists of five pieces: pure functions of a rollout or of a micro-batch."""

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
"""Returns (N, K) advantages of turns, or None for TRL's own."""
Keep: TypeAlias = Callable[[ScoredRollout], Tensor]
"""Returns a bool mask of the trajectories, (N,), or tokens, (N, T), that stay in the loss and its denominator."""
Weight: TypeAlias = Callable[[Tensor, TurnLayout], Tensor]
"""Returns (B, T) weights that correct the engine's mismatch, from d = log π_old − log μ (B, T) and the turns."""
Surrogate: TypeAlias = Callable[[MicroBatch], Objective]
"""Returns the objective of each token, and where its gradient is stopped."""
Term: TypeAlias = Callable[[MicroBatch], tuple[Tensor, Metrics]]
"""Returns a mean over the trajectories of the micro-batch, which is added to the loss, and metrics."""


@dataclass(frozen=True)
class Method:
    """How rewards become advantages, and advantages become a loss.

    A piece is any function with the right arguments. Those of this package are frozen dataclasses, whose fields are
    the piece's settings: `Method(terms=(ClipPenalty(coef=1.0),))`. Raises ValueError for pieces of the wrong type.
    """

    credit: Credit = field(default_factory=GroupMean)
    """Decides which advantage each turn gets."""
    keep: tuple[Keep, ...] = ()
    """Choose what is trained on: whatever all of them keep."""
    weight: Weight | None = None
    """Corrects the mismatch between trainer and engine; None leaves that to TRL's options."""
    surrogate: Surrogate = field(default_factory=PPOMin)
    """Decides what is maximised and what is clipped."""
    terms: tuple[Term, ...] = ()
    """Their values are added to the loss."""
    name: str = field(default="", compare=False)
    """The name that trackers show, from `METHODS` or yours."""

    def __post_init__(self) -> None:
        for name in ("keep", "terms"):
            pieces = getattr(self, name)
            if not isinstance(pieces, tuple):
                raise ValueError(f"`{name}` is {pieces!r}, but must be a tuple of functions.")
        for name, piece in self.pieces():
            if not callable(piece):
                raise ValueError(f"`{name}` has {piece!r}, but must be a function: see `sorl_trl.methods`.")

    def pieces(self) -> list[tuple[str, Any]]:
        """Every piece that is set, with the name of its field."""
        found = []
        for each in fields(self)[:-1]:
            value = getattr(self, each.name)
            several = value if isinstance(value, tuple) else () if value is None else (value,)
            found += [(each.name, piece) for piece in several]
        return found

    def describe(self) -> str:
        """The pieces with their arguments, in one line."""
        return ", ".join(f"{name}: {piece_name(piece)}" for name, piece in self.pieces())


def piece_name(piece: Any) -> str:
    """How a piece is shown: a dataclass with its fields, a function by its name."""
    return getattr(piece, "__name__", None) or repr(piece)
