"""MA-RLHF: PPO whose time steps are macro actions of several tokens."""

from __future__ import annotations

from sorl_trl.methods.method import PPO, Method

__all__ = ["MA_RLHF"]

MA_RLHF = Method(
    name="ma_rlhf",
    settings=PPO.settings
    | {"advantage_level": "macro", "macro_action_tokens": 5, "value_pool": "mean", "gae_lambda": 0.95},
    source="MA-RLHF, arXiv 2410.02743, as in its authors' code",
)
