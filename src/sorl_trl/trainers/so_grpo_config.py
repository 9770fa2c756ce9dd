"""Configuration of `SOGRPOTrainer`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sorl_trl.checks import Problem
from sorl_trl.trainers.base_config import TurnLevelConfig
from sorl_trl.trainers.config_docs import documented
from sorl_trl.trainers.config_rules import group_problems
from sorl_trl.trainers.options.credit_rules import group_credit_problems


@documented
@dataclass
class SOGRPOConfig(TurnLevelConfig):
    """Configuration of [`SOGRPOTrainer`]: `trl.GRPOConfig` with the turn-level switches of [`TurnLevelConfig`].

    The defaults are turn-level group advantages, sequence ratios whose clip range narrows as sequences grow longer,
    and a learning rate that follows the KL: what held best (docs/results.md). SORL's turn ratios are
    `importance_sampling_level="turn"`; its KL penalty was seen to cost exact match beside `target_kl` and to gain
    none. `docs/paper_index.md` lists the settings of every named variant, SO-GRPO as specified among them.
    """

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        yield from group_problems(self)
        yield from group_credit_problems(self)
