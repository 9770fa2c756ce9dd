"""Terms and forms of the loss that other methods have."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from sorl_trl.checks import NOT_NEGATIVE, SWITCH, Number, OneOf

TURN_MODES = ("turn_mask", "turn_truncate")
MISMATCH_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", *TURN_MODES)
BETWEEN_0_AND_1 = Number(above=0, below=1)


@dataclass
class LossOptions:
    """Terms and forms of the loss that other methods have."""

    double_sided_clip: Annotated[bool, SWITCH] = field(
        default=False,
        metadata={
            "help": "Clip as SAO does (arXiv 2607.07508, as its abstract says): a token outside the clip range gives "
            "no gradient, whatever the sign of its advantage. Off, PPO's min lets those pull that would come back "
            "into the range. For ratios of every level; not with `delta`, `clip_normalization='bias_norm'` or a loss "
            "without PPO's min."
        },
    )
    llds_coef: Annotated[float, NOT_NEGATIVE] = field(
        default=0.0,
        metadata={
            "help": "Coefficient of LLDS's loss (arXiv 2512.04220), which holds up the likelihood of trajectories "
            "whose advantage, in the mean over their model tokens, is at least 0: in each of their turns that has "
            "become less likely than under the old policy, what its tokens have lost, per token of such "
            "trajectories. The authors report 0.2, and that 0.01 only delays a collapse. 0 (default): off. With one "
            "update per rollout it is 0."
        },
    )
    minirl_cap: Annotated[float, Number(above=0)] = field(
        default=5.0,
        metadata={
            "help": "With `loss_type='minirl'`, the most that a token's weight may be: the ratio of policy to old "
            "policy, times that of old policy to vLLM with `vllm_importance_sampling_correction`. 5, as in the paper."
        },
    )
    vllm_importance_sampling_mode: Annotated[str, OneOf(MISMATCH_MODES)] = field(
        default="sequence_mask",
        metadata={
            "help": "How the ratio of the old policy to vLLM weighs the loss: TRL's 'token_truncate', 'token_mask', "
            "'sequence_truncate' and 'sequence_mask' (default, TRL's: with a bound of 3 on the product over a whole "
            "trajectory it drops long ones), and two of ours, of the geometric mean over each turn. 'turn_mask': a "
            "turn outside of `vllm_importance_sampling_clip_min` and `vllm_importance_sampling_clip_max` leaves the "
            "loss and what it divides by, the others weigh what their ratio is. 'turn_truncate': each turn weighs "
            "its ratio, cut to these bounds."
        },
    )
    mismatch_veto: Annotated[float | None, BETWEEN_0_AND_1] = field(
        default=None,
        metadata={
            "help": "Leave out each trajectory with a token whose ratio of the old policy to vLLM is below this: out "
            "of the loss and of what it divides by, not of its group's baseline. Public implementations have 1e-4. "
            "None (default): none is left out."
        },
    )
