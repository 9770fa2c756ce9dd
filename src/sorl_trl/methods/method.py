"""A method, which is the whole algorithm: pieces and numbers, also as config fields describe it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import SimpleNamespace
from typing import Annotated, Any, TypeAlias

from torch import Tensor

from sorl_trl.checks import NOT_NEGATIVE, SHARE, SWITCH, check_fields
from sorl_trl.methods.credit import GAE, GroupMean
from sorl_trl.methods.data import Clip, Metrics, MicroBatch, Objective, Ratio, ScoredRollout
from sorl_trl.methods.losses import (
    CISPO,
    SAPO,
    VESPO,
    Mean,
    PPOMin,
    Soft,
    constant_mean,
    micro_batch_mean,
    token_mean,
    token_sum,
    trajectory_mean,
    turn_mean,
)

Credit: TypeAlias = Callable[[ScoredRollout], Tensor]
"""Returns advantages of trajectories, (N,), or turns, (N, K)."""
Keep: TypeAlias = Callable[[ScoredRollout], Tensor]
"""Returns a bool mask (N,) of the trajectories that stay in the loss and its denominator.

Rewards of dropped trajectories stay in the group's baseline, in the reward metrics and in evaluations."""
Surrogate: TypeAlias = Callable[[MicroBatch], Objective]
"""Returns the objective of each token, and where its gradient is stopped."""
Term: TypeAlias = Callable[[MicroBatch], tuple[Tensor, Metrics]]
"""Returns a mean over the trajectories of the micro-batch, which is added to the loss, and metrics."""


@dataclass(frozen=True)
class Method:
    """How rewards become advantages, and advantages become a loss: the whole algorithm.

    A piece is any function with the right arguments. Those of this package are frozen dataclasses, whose fields are
    the piece's settings: `Method(terms=(ClipPenalty(coef=1.0),))`. A piece may have `check(method, config)`, which
    raises ValueError if it does not fit the rest of the method or the trainer's config. Methods are equal if all but
    name and source are.

    Raises ValueError for pieces of the wrong type and numbers out of range.
    """

    ratio: Ratio = field(default_factory=Ratio)
    """The unit that shares an importance ratio."""
    clip: Clip = field(default_factory=Clip)
    """How far ratios may move before they are clipped."""
    surrogate: Surrogate = field(default_factory=PPOMin)
    """Computes what is maximised and what is clipped."""
    mean: Mean = turn_mean
    """Averages it over a micro-batch; also the critic's loss."""
    credit: Credit | GAE = field(default_factory=GroupMean)
    """Computes the advantages."""
    keep: tuple[Keep, ...] = ()
    """Select what is trained on: what all of them keep."""
    terms: tuple[Term, ...] = ()
    """Their values are added to the loss."""
    gamma: Annotated[float, SHARE] = 1.0
    """The discount per turn, or per time step of `GAE`."""
    target_kl: Annotated[float, NOT_NEGATIVE] = 0.01
    """Our addition: the KL to the old policy that the learning rate aims for (docs/concepts.md); 0 leaves the rate."""
    bias_norm: Annotated[bool, SWITCH] = False
    """Whether the gradient is divided by max(1, norm of the clipping bias), as in ST-PPO."""
    name: str = field(default="", compare=False)
    """The name that trackers show, from `METHODS` or yours."""
    source: str = field(default="", compare=False)
    """The paper, and how we know it."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name, kind in SINGLE.items():
            if not isinstance(value := getattr(self, name), kind):
                raise ValueError(f"`{name}` is {value!r}, but must be a `{kind.__name__}`.")
        for name in ("keep", "terms"):
            pieces = getattr(self, name)
            if not isinstance(pieces, tuple):
                raise ValueError(f"`{name}` is {pieces!r}, but must be a tuple of functions.")
        for name, piece in self.pieces():
            if name not in (*SINGLE, *NUMBERS) and not callable(piece):
                raise ValueError(f"`{name}` has {piece!r}, but must be a function: see `sorl_trl.methods`.")
        if self.keep and self.mean is micro_batch_mean:
            raise ValueError(
                "`mean` is micro_batch_mean (`loss_type` 'bnpo'), which cannot leave out what `keep` drops: use "
                "token_mean ('dapo'), which averages over the whole rollout's tokens, or another."
            )
        if self.bias_norm and isinstance(self.surrogate, Soft):
            raise ValueError(
                f"`bias_norm` is True, which divides by what clipping removes, but the surrogate is "
                f"{self.surrogate!r}, which never zeroes a gradient: set `bias_norm` to False."
            )

    @classmethod
    def from_config(cls, config: Any) -> Method:
        """The method that a trainer's config describes, without `keep` and `terms`."""
        surrogate, mean = LOSS_TYPES[config.loss_type](config)
        credit: Any = GroupMean(config.scale_rewards, config.multi_objective_aggregation)
        if hasattr(config, "advantage_level"):
            credit = GAE(config.advantage_level, config.gae_lambda, config.whiten_advantages)
        return cls(
            ratio=Ratio(config.importance_sampling_level, config.turn_ratio),
            clip=Clip(config.epsilon, config.epsilon_high, config.delta, config.scale_clip_range),
            surrogate=surrogate,
            mean=mean,
            credit=credit,
            gamma=config.gamma,
            target_kl=config.target_kl,
            bias_norm=config.bias_norm,
        )

    def check(self, config: Any, has_critic: bool) -> None:
        """Raise ValueError if the method does not fit the trainer, or its pieces not each other or the config."""
        if self.needs_critic != has_critic:
            credit = f"`credit` of {self._called} is {self.credit!r}"
            if has_critic:
                raise ValueError(
                    f"{credit}, but advantages come from the critic: set it to `GAE()` (`gae` in a "
                    "recipe), or use `SOGRPOTrainer` (`--trainer so_grpo`)."
                )
            raise ValueError(f"{credit}, which needs a critic: use `SOPPOTrainer` (`--trainer so_ppo`).")
        for _, piece in self.pieces():
            if hasattr(piece, "check"):
                piece.check(self, config)

    def check_decided(self, config: Any, decided: Collection[str]) -> None:
        """Raise ValueError for config fields that ask for another of the `decided` pieces than the method has."""
        asked, given = Method.from_config(config), changed(config)
        without = {name: Method.from_config(SimpleNamespace(**vars(config) | {name: old})) for name, _, old in given}
        for piece in (piece for piece in decided if getattr(self, piece) != getattr(asked, piece)):
            wanted = getattr(asked, piece)
            asking = [name for name, _, _ in given if getattr(without[name], piece) != wanted]
            if asking:
                found = " and ".join(f"`{name}` is {getattr(config, name)!r}" for name in asking)
                named = f"name: {self.name}, " if self.name else ""
                raise ValueError(
                    f"{found}, but {self._called} decides `{piece}`: {getattr(self, piece)!r}. Keep the default, or "
                    f"give the method `{piece}={wanted!r}`: with `dataclasses.replace`, or in a recipe, as `method: "
                    f"{{{named}{piece}: …}}`."
                )

    @property
    def needs_critic(self) -> bool:
        return bool(getattr(self.credit, "needs_values", False))

    @property
    def _called(self) -> str:
        return f"`method` {self.name!r}" if self.name else "`method`"

    def pieces(self) -> list[tuple[str, Any]]:
        """Every piece and number that is set, with the name of its field."""
        found = []
        for name in DECIDES:
            value = getattr(self, name)
            several = value if isinstance(value, tuple) else () if value is None else (value,)
            found += [(name, piece) for piece in several]
        return found

    def describe(self) -> str:
        """The method in one line: its name, pieces with their settings, and numbers."""
        return f"{self.name or 'own'}: " + ", ".join(f"{name} {piece}" for name, piece in self.shown())

    def shown(self) -> list[tuple[str, str]]:
        """Every piece and number, by the name of its field, as text."""
        return [(name, getattr(piece, "__name__", None) or repr(piece)) for name, piece in self.pieces()]


SINGLE: Mapping[str, type] = {"ratio": Ratio, "clip": Clip}
"""The fields of `Method` with one kind of piece."""
NUMBERS = ("gamma", "target_kl", "bias_norm")
"""The fields of `Method` that hold plain values."""
DECIDES = tuple(each.name for each in fields(Method) if each.compare)
"""The fields of `Method` that decide the algorithm."""


def changed(instance: Any) -> list[tuple[str, Any, Any]]:
    """Name, value and default of the fields of a dataclass that are not at their default."""
    given = ((each.name, getattr(instance, each.name), each.default) for each in fields(instance))
    return [each for each in given if each[2] is not MISSING and each[1] != each[2]]


def _cap(config: Any) -> float:
    return float(config.epsilon if config.epsilon_high is None else config.epsilon_high)


LOSS_TYPES: Mapping[str, Callable[[Any], tuple[Surrogate, Mean]]] = {
    "turn": lambda config: (PPOMin(), turn_mean),
    "grpo": lambda config: (PPOMin(), trajectory_mean),
    "dr_grpo": lambda config: (PPOMin(), constant_mean),
    "dapo": lambda config: (PPOMin(), token_mean),
    "bnpo": lambda config: (PPOMin(), micro_batch_mean),
    "luspo": lambda config: (PPOMin(), token_sum),
    "cispo": lambda config: (CISPO(_cap(config)), token_mean),
    "sapo": lambda config: (SAPO(config.sapo_temperature_pos, config.sapo_temperature_neg), trajectory_mean),
    "vespo": lambda config: (
        VESPO(config.vespo_k_pos, config.vespo_lambda_pos, config.vespo_k_neg, config.vespo_lambda_neg),
        token_mean,
    ),
}
"""What each `loss_type` of a config means."""
