"""GSPO, one ratio per sequence; and our Sequence, which adds a clip range divided by length, and `target_kl`.

The clip range of GSPO's authors, 3e-4 and 4e-4, is for responses of thousands of tokens. It clips nearly everything in
short trajectories, where TRL's default of 0.2 or Sequence fits better.
"""

from __future__ import annotations

from dataclasses import replace

from sorl_trl.methods.method import GRPO, Method

__all__ = ["GSPO", "SEQUENCE", "SEQUENCE_PPO"]

GSPO = Method(
    name="gspo",
    settings=GRPO.settings | {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    source="GSPO, arXiv 2507.18071, as in TRL, with a clip range that TRL cites",
)
SEQUENCE = Method(
    name="sequence",
    settings={
        "importance_sampling_level": "sequence",
        "clip_range_scaling": "length",
        "epsilon": 0.2,
        "loss_type": "grpo",
    },
    source="our variant of GSPO, arXiv 2507.18071",
)
SEQUENCE_PPO = replace(SEQUENCE, name="sequence_ppo")
