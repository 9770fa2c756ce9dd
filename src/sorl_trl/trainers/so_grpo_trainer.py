"""SO-GRPO: GRPO with turn-level importance ratios and clipping-triggered normalization (SORL)."""

from __future__ import annotations

from typing import ClassVar

from sorl_trl.trainers.base import TurnLevelTrainer
from sorl_trl.trainers.config import SOGRPOConfig, TurnLevelConfig
from sorl_trl.trainers.model_card import SORL_PAPER


class SOGRPOTrainer(TurnLevelTrainer):
    """Drop-in replacement for `trl.GRPOTrainer`: swap the two names and train turn by turn.

    The arguments are those of `GRPOTrainer`, and `method`: a `sorl_trl.Method`, a name of `sorl_trl.methods.METHODS`
    or a mapping of pieces. The default, "so_grpo", adds the clipping-triggered penalty to turn-level ratios.

    A reward function may return one float per turn for a completion; a trajectory's turns are those that
    `rollout_func` recorded (`turn_ids`), else the runs of model tokens between tool results. With outcome rewards only
    and `gamma=1` the advantages are TRL's own.

    Ratios, clipping and `target_kl` act from the second update on a rollout on: set `steps_per_generation` above
    `gradient_accumulation_steps`, or `num_iterations` above 1. With TRL's defaults there is one; a warning says so.

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
        ValueError: a method that does not go with the loss type, a rollout whose masks, ids and turn ids do not fit
            each other, or a reward function that returns another number of turn rewards than the trajectory has turns.
    """

    config_class: ClassVar[type[TurnLevelConfig]] = SOGRPOConfig
    default_method: ClassVar[str] = "so_grpo"
    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "so-grpo"]
    _name = "SO-GRPO"
    _paper = SORL_PAPER
