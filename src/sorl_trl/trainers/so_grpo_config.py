"""Configuration of `SOGRPOTrainer`."""

from __future__ import annotations

from dataclasses import dataclass

from sorl_trl.trainers.base_config import TurnLevelConfig


@dataclass
class SOGRPOConfig(TurnLevelConfig):
    """Configuration of [`SOGRPOTrainer`]: `trl.GRPOConfig` with the turn-level switches of [`TurnLevelConfig`].

    The defaults are SO-GRPO: geometric turn ratios, turn-level group advantages, the KL penalty triggered by clipping
    and the turn-mean objective; and two additions of ours, `target_kl` and a narrow lower clip range.
    `docs/paper_to_code.md` lists the settings of every named variant, SO-GRPO as specified among them.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma != 1.0 and self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"`multi_objective_aggregation` is {self.multi_objective_aggregation!r}, but `gamma` below 1 needs "
                "'sum_then_normalize'."
            )
