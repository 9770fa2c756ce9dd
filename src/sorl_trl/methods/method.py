"""A method and its five pieces, pure functions of a rollout or a micro-batch; and the baselines."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

from torch import Tensor

from sorl_trl.methods.data import Metrics, MicroBatch, Objective, ScoredRollout
from sorl_trl.ops import TurnLayout, clipped_surrogate, group_turn_advantages, is_clipped, turn_std
from sorl_trl.ops.advantages import STD_FLOOR

__all__ = ["GRPO", "PPO", "REINFORCE", "GroupMean", "Method", "PPOMin"]

Credit: TypeAlias = Callable[[ScoredRollout], Tensor | None]
"""Returns (N, K) advantages of turns, or None for TRL's own."""
Keep: TypeAlias = Callable[[ScoredRollout], Tensor]
"""Returns a bool mask of the trajectories, (N,), or tokens, (N, T), that stay in the loss and its denominator.

Rewards of dropped trajectories stay in the group's baseline, in the reward metrics and in evaluations."""
Weight: TypeAlias = Callable[[Tensor, TurnLayout], Tensor]
"""Returns (B, T) weights that correct the engine's mismatch, from d = log π_old − log μ (B, T) and the turns."""
Surrogate: TypeAlias = Callable[[MicroBatch], Objective]
"""Returns the objective of each token, and where its gradient is stopped."""
Term: TypeAlias = Callable[[MicroBatch], tuple[Tensor, Metrics]]
"""Returns a mean over the trajectories of the micro-batch, which is added to the loss, and metrics."""


@dataclass(frozen=True)
class GroupMean:
    """GRPO's credit (arXiv 2402.03300), per turn: its return, compared with the group's turns of the same index.

    With only outcome rewards and γ = 1, these are GRPO's advantages, so TRL's own are used.
    """

    def __call__(self, rollout: ScoredRollout) -> Tensor | None:
        """(N, K) advantages, or None for TRL's own."""
        if rollout.gamma == 1.0 and not rollout.has_turn_reward.any():
            return None
        return group_mean_advantages(rollout)


@dataclass(frozen=True)
class PPOMin:
    """PPO's min(w Â, clip(w, 1 − ε_low, 1 + ε_high) Â) (arXiv 1707.06347), with TRL's `delta` if that is set."""

    def __call__(self, batch: MicroBatch) -> Objective:
        """The objective of each token with the ratio of its unit."""
        ratio = batch.ratio
        value = clipped_surrogate(ratio, batch.advantages, *batch.clip_range)
        return Objective(value, is_clipped(ratio.detach(), batch.advantages, *batch.clip_range))


@dataclass(frozen=True)
class Method:
    """How rewards become advantages, and advantages become a loss.

    A piece is any function with the right arguments. Those of this package are frozen dataclasses, whose fields are
    the piece's settings: `Method(terms=(ClipPenalty(coef=1.0),))`. Raises ValueError for pieces of the wrong type.
    Methods are equal if their pieces are.
    """

    credit: Credit = field(default_factory=GroupMean)
    """Computes the advantage of each turn."""
    keep: tuple[Keep, ...] = ()
    """Select what is trained on: what all of them keep."""
    weight: Weight | None = None
    """Corrects the mismatch between trainer and engine; None leaves that to TRL's options."""
    surrogate: Surrogate = field(default_factory=PPOMin)
    """Computes what is maximised and what is clipped."""
    terms: tuple[Term, ...] = ()
    """Their values are added to the loss."""
    name: str = field(default="", compare=False)
    """The name that trackers show, from `METHODS` or yours."""
    settings: dict[str, Any] = field(default_factory=dict, compare=False)
    """The config fields that the source sets. A trainer does not apply them: put them into its config."""
    source: str = field(default="", compare=False)
    """The paper, and how we know it."""

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
        for name in PIECE_FIELDS:
            value = getattr(self, name)
            several = value if isinstance(value, tuple) else () if value is None else (value,)
            found += [(name, piece) for piece in several]
        return found

    def describe(self) -> str:
        """The pieces in one line, dataclasses with their fields and functions by their names."""
        shown = ((name, getattr(piece, "__name__", None) or repr(piece)) for name, piece in self.pieces())
        return ", ".join(f"{name}: {piece}" for name, piece in shown)


PIECE_FIELDS = tuple(each.name for each in fields(Method) if each.compare)
"""The fields of `Method` that hold pieces."""


def recipe_name(piece: type) -> str:
    """What recipes call a piece: the words of its class in lower case, such as `clip_penalty`, `ppo_min` and `minirl`.

    A word begins with a capital before a lower-case letter or at the end. Other capitals continue the word before.
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z]([a-z]|$))|(?<=[A-Z])(?=[A-Z][a-z])", "_", piece.__name__).lower()


def group_mean_advantages(rollout: ScoredRollout) -> Tensor:
    """`group_turn_advantages` of a rollout, scaled by its `scale`: (N, K)."""
    scale = rollout.scale == "group"
    advantages = group_turn_advantages(rollout.returns, rollout.turn_mask, rollout.num_generations, scale)
    return over_batch(advantages, rollout)


def over_batch(advantages: Tensor, rollout: ScoredRollout) -> Tensor:
    """The advantages, divided by the spread of the batch's returns if `scale` is "batch": (N, K)."""
    if rollout.scale != "batch":
        return advantages
    returns = rollout.returns
    return advantages / (turn_std(returns, rollout.turn_mask, len(returns)) + STD_FLOOR)


GRPO = Method(
    name="grpo",
    settings={"importance_sampling_level": "token", "loss_type": "grpo", "epsilon": 0.2, "target_kl": 0.0},
    source="GRPO, arXiv 2402.03300",
)
PPO = Method(
    name="ppo",
    settings=GRPO.settings | {"advantage_level": "token", "loss_type": "bnpo"},
    source="PPO, arXiv 1707.06347, with GAE, arXiv 1506.02438",
)
REINFORCE = Method(
    name="reinforce",
    settings=GRPO.settings | {"scale_rewards": "batch", "loss_type": "dapo"},
    source="Search-R1++, arXiv 2602.19526, from its abstract",
)
"""It makes one update on each rollout: set `num_iterations=1`, and `gradient_accumulation_steps` to
`steps_per_generation`. Its reward, known second-hand, is F1, less 0.1 without a search and 0.1 without an answer."""
