"""MA-RLHF: PPO whose time steps are macro actions of several tokens.

A macro action has `macro_action_tokens` tokens of a turn, or 1, 2, 3, 5 and 10 in random order with 0. Its tokens
share an advantage, and each keeps its own ratio. What differs from the authors' code:

- Macro actions end where a turn ends, and each trajectory has its own boundaries. The source takes those of the first
  trajectory for the whole batch.
- Rewards add up over a macro action, so the last one has whatever tokens are left. The source averages rewards, and so
  gives the last token a macro action of its own. With `kl_in_reward`, the KL adds up as well.
- Random lengths are drawn for each trajectory and start again after 21 tokens. The source draws one order for a batch.
- The source also ends macro actions at constituents or where perplexity rises, which is not implemented. It bounds
  rewards at 2.5, sets `whiten_advantages=False`, and uses `kl_in_reward=True` with a `beta` of 0.05 to 0.1. The
  settings here leave these options alone.

With `value_pool="mean"`, as in the source, all values of a macro action but the first depend on what it has done so
far, which biases advantages. `SOPPOConfig`'s default, "first", has no such bias.
"""

from __future__ import annotations

from sorl_trl.methods.method import PPO, Method

__all__ = ["MA_RLHF"]

MA_RLHF = Method(
    name="ma_rlhf",
    settings=PPO.settings
    | {"advantage_level": "macro", "macro_action_tokens": 5, "value_pool": "mean", "gae_lambda": 0.95},
    source="MA-RLHF, arXiv 2410.02743, as in its authors' code",
)
