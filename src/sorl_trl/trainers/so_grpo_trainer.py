"""SO-GRPO: GRPO with the turn-level importance ratios of SORL and a gated KL penalty."""

from __future__ import annotations

from typing import ClassVar

from sorl_trl.trainers.base import TurnLevelTrainer
from sorl_trl.trainers.config import SOGRPOConfig, TurnLevelConfig
from sorl_trl.trainers.model_card import SORL_PAPER


class SOGRPOTrainer(TurnLevelTrainer):
    """Drop-in replacement for `trl.GRPOTrainer` with turns as the unit of the loss.

    It takes the arguments of `GRPOTrainer` and `method`: a `sorl_trl.Method`, a name of `sorl_trl.methods.METHODS`, or
    a mapping of pieces. The default, "so_grpo", adds a KL penalty to turn-level ratios (`ClipPenalty`).

    A reward function may return one float per turn of a completion. The turns of a trajectory are those that
    `rollout_func` records as `turn_ids`, or else the runs of model tokens between tool results. With only outcome
    rewards and `gamma=1`, the advantages are TRL's own.

    Ratios, clipping and `target_kl` act from the second update on a rollout on. TRL's defaults make only one, and a
    warning says so: set `steps_per_generation` above `gradient_accumulation_steps`, or `num_iterations` above 1.

    Example:

    ```python
    trainer = SOGRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=accuracy_reward,
        args=SOGRPOConfig(output_dir="out", steps_per_generation=8),  # 8 updates per rollout
        train_dataset=dataset,
    )
    trainer.train()
    ```

    Raises:
        TypeError: `args` is not a `SOGRPOConfig`.
        ValueError: The method does not go with the loss type; masks, ids and turn ids of a rollout do not match; or a
            reward function returns a number of turn rewards that differs from the number of turns.
    """

    config_class: ClassVar[type[TurnLevelConfig]] = SOGRPOConfig
    default_method: ClassVar[str] = "so_grpo"
    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "so-grpo"]
    _name = "SO-GRPO"
    _paper = SORL_PAPER
