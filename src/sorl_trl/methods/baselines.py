"""The baselines, of default pieces: GRPO, PPO, and REINFORCE as in Search-R1++."""

from __future__ import annotations

from sorl_trl.methods.method import Method

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
