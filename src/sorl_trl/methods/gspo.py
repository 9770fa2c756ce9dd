"""GSPO, one ratio per sequence.

The clip range of GSPO's authors, 3e-4 and 4e-4, is for responses of thousands of tokens. It clips nearly everything in
short trajectories, where TRL's default of 0.2 fits better.
"""

from __future__ import annotations

from dataclasses import replace

from sorl_trl.methods.data import Clip, Ratio
from sorl_trl.methods.method import GRPO

__all__ = ["GSPO"]

GSPO = replace(
    GRPO,
    ratio=Ratio("sequence"),
    clip=Clip(3e-4, 4e-4),
    name="gspo",
    source="GSPO, arXiv 2507.18071, as in TRL, with a clip range that TRL cites",
)
