"""GSPO, one ratio per sequence.

The clip range of GSPO's authors, 3e-4 and 4e-4, is for responses of thousands of tokens. It clips nearly everything in
short trajectories, where TRL's default of 0.2 fits better.
"""

from __future__ import annotations

from sorl_trl.methods.method import GRPO, Method

__all__ = ["GSPO"]

GSPO = Method(
    name="gspo",
    settings=GRPO.settings | {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    source="GSPO, arXiv 2507.18071, as in TRL, with a clip range that TRL cites",
)
