"""Terms and forms of the loss that other methods have."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class LossOptions:
    """Terms and forms of the loss that other methods have."""

    double_sided_clip: bool = field(
        default=False,
        metadata={
            "help": "Clip as SAO does (arXiv 2607.07508, as its abstract says): a token outside the clip range gives "
            "no gradient, whatever the sign of its advantage. Off, PPO's min lets those pull that would come back "
            "into the range. For ratios of every level; not with `delta`, `clip_normalization='bias_norm'` or a loss "
            "without PPO's min."
        },
    )
