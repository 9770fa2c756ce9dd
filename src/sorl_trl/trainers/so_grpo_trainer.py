"""SO-GRPO: GRPO with turn-level group advantages, and SORL's turn-level ratios and normalization as switches."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from sorl_trl.ops import (
    group_turn_advantages,
    turn_broadcast,
    turn_returns,
    turn_std,
)
from sorl_trl.trainers.base_trainer import TurnLevelTrainer
from sorl_trl.trainers.paper import SORL_PAPER
from sorl_trl.trainers.so_grpo_config import SOGRPOConfig
from sorl_trl.trainers.turns.recording import ScoredRollout, gather_rows, show_advantages


class SOGRPOTrainer(TurnLevelTrainer):
    """Drop-in replacement for `trl.GRPOTrainer`: swap the two names and train turn by turn.

    Beyond TRL's trainer, a reward function may return one float per turn for a completion; a trajectory's turns are
    those that `rollout_func` recorded (`turn_ids`), else the runs of model tokens between tool results. With outcome
    rewards only and `gamma=1` the advantages are TRL's own.

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
        ValueError: a rollout whose masks, ids and turn ids do not fit each other, or a reward function that returns
            another number of turn rewards than the trajectory has turns.
    """

    config_class: ClassVar[type[SOGRPOConfig]] = SOGRPOConfig
    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "so-grpo"]
    _name = "SO-GRPO"
    _paper: ClassVar[dict[str, str]] = SORL_PAPER

    def _add_advantages(self, output: dict[str, Any], rollout: ScoredRollout) -> None:
        advantages = self._turn_advantages(rollout)
        if advantages is not None:
            output["advantages"] = turn_broadcast(advantages, output["turn_ids"])
            show_advantages(self, advantages, rollout.turns.turn_mask)

    def _turn_advantages(self, rollout: ScoredRollout) -> Tensor | None:
        """(B, K) of the local trajectories; `None` where TRL's own outcome advantages are the same thing."""
        wanted = torch.tensor(rollout.has_turn_rewards or self.args.gamma != 1.0, device=self.accelerator.device)
        if not self.accelerator.gather(wanted).any():
            return None
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"`multi_objective_aggregation` is {self.multi_objective_aggregation!r}, but turn rewards "
                "need 'sum_then_normalize'."
            )
        mask = (rollout.turns.turn_mask & rollout.scored[:, None]).float()
        returns = turn_returns(rollout.turn_rewards, mask, self.args.gamma)
        advantages = self._group_advantages(
            gather_rows(self.accelerator, returns), gather_rows(self.accelerator, mask)
        )
        first = self.accelerator.process_index * len(returns)
        return advantages[first : first + len(returns), : returns.shape[1]]

    def _group_advantages(self, returns: Tensor, mask: Tensor) -> Tensor:
        """Group advantages over the whole batch, scaled as `scale_rewards` says."""
        num_generations = self.num_generations if self.model.training else self.num_generations_eval
        advantages = group_turn_advantages(returns, mask, num_generations, scale=self.scale_rewards == "group")
        if self.scale_rewards == "batch":
            advantages = advantages / (turn_std(returns, mask, len(returns)) + 1e-4)
        return advantages
