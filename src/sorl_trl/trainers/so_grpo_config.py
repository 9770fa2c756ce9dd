"""Configuration of `SOGRPOTrainer`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sorl_trl.checks import Problem
from sorl_trl.trainers.base_config import TurnLevelConfig
from sorl_trl.trainers.config_docs import documented
from sorl_trl.trainers.config_rules import group_problems


@documented
@dataclass
class SOGRPOConfig(TurnLevelConfig):
    """Configuration of [`SOGRPOTrainer`]: `trl.GRPOConfig` with the turn-level switches of [`TurnLevelConfig`].

    The defaults are turn ratios (geometric means; the note on SORL has arithmetic ones), turn-level group advantages
    and the turn-mean objective, and two additions of ours, `target_kl` and a clip range that narrows as turns grow
    longer. SORL's KL penalty is off: beside `target_kl` it was seen to cost exact match and to gain none
    (docs/results.md). `docs/paper_index.md` lists the settings of every named variant, SO-GRPO as
    specified among them.
    """

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        yield from group_problems(self)
