"""The named methods, each with its source: what a paper changes is a line here, and its pieces are in other files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sorl_trl.methods.credit import GAE, AgentWise, GiGPO, LeaveOneOut, ZeroVariance
from sorl_trl.methods.data import Clip, Ratio
from sorl_trl.methods.losses import ClipPenalty, micro_batch_mean, token_mean, trajectory_mean
from sorl_trl.methods.method import Method

# -------------------------------------------------------------------------------------------------------------------
# SORL (arXiv 2511.20718): SO-GRPO and SO-PPO from version 2, and ST-PPO and its variants from version 1
# -------------------------------------------------------------------------------------------------------------------

_OURS = "SORL, arXiv 2511.20718 v2, from its abstract and a summary; we chose clip range and gate"
_NOTE = "SORL, arXiv 2511.20718 v2, as specified in a summary; we chose λ and the KL's estimator"
_V1 = "arXiv 2511.20718 v1, from its abstract and reviews"
_SO = Method(terms=(ClipPenalty(),), source=_OURS)
_SO_NOTE = Method(
    ratio=Ratio(average="arithmetic"),
    clip=Clip(0.2, by_length=False),
    terms=(ClipPenalty(coef=3.0, epsilon=None),),
    target_kl=0.0,
    source=_NOTE,
)
_ST = Method(clip=Clip(0.2, by_length=False), mean=trajectory_mean, target_kl=0.0, bias_norm=True)
_ST_PPO = replace(_ST, credit=GAE("token"), source=f"ST-PPO, {_V1}")

# -------------------------------------------------------------------------------------------------------------------
# Methods that start from GRPO
# -------------------------------------------------------------------------------------------------------------------

_GRPO = Method(
    ratio=Ratio("token"), clip=Clip(0.2), mean=trajectory_mean, target_kl=0.0, source="GRPO, arXiv 2402.03300"
)
_PPO = replace(
    _GRPO,
    mean=micro_batch_mean,
    credit=GAE("token"),
    source="PPO, arXiv 1707.06347, with GAE, arXiv 1506.02438",
)
_GSPO = replace(
    _GRPO,
    ratio=Ratio("sequence"),
    # The range of GSPO's authors is for responses of thousands of tokens. It clips nearly everything in short
    # trajectories, where TRL's default of 0.2 fits better.
    clip=Clip(3e-4, 4e-4),
    source="GSPO, arXiv 2507.18071, as in TRL, with a clip range that TRL cites",
)
_DAPO = replace(
    _GRPO,
    clip=Clip(0.2, 0.28),
    mean=token_mean,
    keep=(ZeroVariance(),),
    source="DAPO, arXiv 2503.14476, second-hand",
)
_LOOP = replace(
    _GRPO, clip=Clip(1 - 1 / 1.1, 0.1), credit=LeaveOneOut(), source="LOOP, arXiv 2502.01600, from public code"
)
_GIGPO = replace(_GRPO, credit=GiGPO(), gamma=0.95, source="GiGPO, arXiv 2505.10978, from public code")
_DR_MAS = replace(
    _GRPO,
    clip=Clip(0.2, delta=3.0),
    mean=token_mean,
    credit=AgentWise(),
    source="Dr. MAS, arXiv 2602.08847, from the paper and public code",
)

_UNNAMED = {
    "dapo": _DAPO,
    "dr_mas": _DR_MAS,
    "gigpo": _GIGPO,
    "grpo": _GRPO,
    "gspo": _GSPO,
    "loop": _LOOP,
    "ppo": _PPO,
    "s_ppo": replace(_ST_PPO, ratio=Ratio("token"), source=f"S-PPO, {_V1}"),
    "so_grpo": _SO,
    "so_grpo_note": _SO_NOTE,
    "so_ppo": replace(_SO, credit=GAE()),
    "so_ppo_note": replace(_SO_NOTE, credit=GAE()),
    "st_grpo": replace(_ST, source="our variant of ST-PPO, arXiv 2511.20718 v1"),
    "st_ppo": _ST_PPO,
    "turn_ppo": replace(_ST_PPO, bias_norm=False, source=f"Turn-PPO, {_V1}"),
}
METHODS: Mapping[str, Method] = {name: replace(method, name=name) for name, method in _UNNAMED.items()}
"""The named methods. Those with `GAE` need `SOPPOTrainer`."""
