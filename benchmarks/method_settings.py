"""What the settings of the stability benchmark's methods are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GROUP = 8
"""Trajectories per prompt of the methods without a critic."""


@dataclass(frozen=True)
class Method:
    """`trainer` is "trl" (`trl.GRPOTrainer`) or one of ours, as recipes name it; `settings` are of its config."""

    title: str
    trainer: str
    description: str
    settings: dict[str, Any]
    tuned: bool = True
    """Whether its own learning rate is looked for; not that of a control."""
    guard: str = ""
    """What a `CollapseGuard` does in its runs; none where it is empty."""
    reward: str = ""
    """Of `sorl_trl.qa.REWARDS`, in place of the world's; empty: the world's."""
    passes: str = ""
    """How a rollout is used, whatever the regime says: "one" update of all its trajectories, or a pass for each of the
    "turns" that a trajectory can have; empty: as the regime says."""
    drawn: bool = True
    """Whether it is in the pictures of the stability report; others have pictures of their own."""

    @property
    def family(self) -> str:
        return "ppo" if self.trainer == "so_ppo" else "grpo"


SYMMETRIC = {"epsilon": 0.2, "epsilon_high": 0.2}
NARROW = {"epsilon": 0.05, "epsilon_high": 0.2}
MIDDLE = {"epsilon": 0.1, "epsilon_high": 0.4}
"""Of one token: by the root of four tokens, the narrow range."""
AUTHORS = {"epsilon": 3e-4, "epsilon_high": 4e-4}
"""Of GSPO's authors (arXiv 2507.18071), for responses of thousands of tokens; `gspo` has TRL's range."""
TOKEN = {"importance_sampling_level": "token", "loss_type": "grpo"}
TURN = {"importance_sampling_level": "turn", "turn_ratio": "geometric", "loss_type": "turn"}
SEQUENCE = {"importance_sampling_level": "sequence", "loss_type": "grpo"}
ARITHMETIC = {"turn_ratio": "arithmetic"}
NONE = {"clip_normalization": "none"}
PENALTY = {"clip_normalization": "kl_penalty", "ctn_coef": 3.0, "ctn_gate": "token", "kl_estimator": "unbiased"}
PLAIN_KL = PENALTY | {"ctn_gate": "none", "ctn_coef": 0.25}
"""The coefficient is lambda times the mean gate in SO-GRPO's choosing runs."""
STRONG_KL = PLAIN_KL | {"ctn_coef": 0.7}
"""The coefficient is what SO-GRPO's penalty puts on the KL in its choosing runs, lambda sum(f KL) / sum(KL):
about three times the above, because the gate is open where the KL is high."""
TARGET = {"target_kl": 0.005}
"""Every other method has a learning rate that nothing adapts."""
SO = NARROW | TURN | PENALTY
SPECIFIED = SYMMETRIC | TURN | ARITHMETIC | PENALTY
"""SORL as specified in the note, which leaves the coefficient and the estimator open: those are ours."""
LENGTH, SQRT = {"clip_range_scaling": "length"}, {"clip_range_scaling": "sqrt_length"}
OWN_SEQUENCE = SYMMETRIC | SEQUENCE | NONE
DEFAULTS = OWN_SEQUENCE | LENGTH | TARGET
BY_TURN = SYMMETRIC | TURN | NONE | SQRT | TARGET
UNEVEN = MIDDLE | TURN | NONE | SQRT | TARGET
PENALIZED = SYMMETRIC | TURN | PENALTY
BIAS_NORM = {"clip_normalization": "bias_norm"}
ST = SYMMETRIC | TURN | BIAS_NORM | {"loss_type": "grpo"}
TOKEN_PPO = {"advantage_level": "token", "loss_type": "grpo"}
PPO = TOKEN | TOKEN_PPO | NONE | {"loss_type": "bnpo"}
PPO_SETTINGS = {
    "num_generations": 1,
    "critic": "model",
    "critic_learning_rate": 1e-3,
    "critic_warmup_steps": 8,
    "value_clip_range": None,
}
"""Of all methods with a critic; docs/ppo.md says why. The critic keeps its learning rate whatever the policy's is."""


Row = tuple[str, str, str, dict[str, Any]]
"""Name, title, description, settings."""


def methods(trainer: str, *rows: Row, tuned: bool = True, **more: Any) -> dict[str, Method]:
    """The methods of some rows; `more` are fields of `Method` that all of them share."""
    return {name: Method(title, trainer, text, settings, tuned, **more) for name, title, text, settings in rows}
