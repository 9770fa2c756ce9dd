"""SO-GRPO: GRPO with turn-level ratios, turn-level group advantages and clipping-triggered normalization."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from sorl_trl.ops import (
    group_turn_advantages,
    masked_mean,
    turn_broadcast,
    turn_counts,
    turn_mask,
    turn_returns,
    turn_std,
)
from sorl_trl.trainers.base_trainer import SORL_PAPER, TurnLevelTrainer
from sorl_trl.trainers.so_grpo_config import SOGRPOConfig
from sorl_trl.trainers.turn_rewards import TurnRewardRecorder


class SOGRPOTrainer(TurnLevelTrainer):
    """Drop-in replacement for `trl.GRPOTrainer`: swap the two names and train turn by turn.

    Beyond TRL's trainer, a reward function may return one float per turn for a completion; a trajectory's turns are
    those that `rollout_func` recorded (`turn_ids`), else the runs of model tokens between tool results. With outcome
    rewards only and `gamma=1` the advantages are TRL's own.

    Example:

    ```python
    trainer = SOGRPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=accuracy_reward,
        args=SOGRPOConfig(output_dir="out"),
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

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        recorder = TurnRewardRecorder(turn_counts(self._turn_ids).tolist())
        reward_funcs = self.reward_funcs
        self.reward_funcs = [
            recorder.wrap(func, index, name)
            for index, (func, name) in enumerate(zip(reward_funcs, self.reward_func_names, strict=True))
        ]
        try:
            rewards_per_func = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        finally:
            self.reward_funcs = reward_funcs
        self._advantages = self._turn_advantages(recorder, rewards_per_func, len(prompts))
        return rewards_per_func

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self._advantages is not None:
            output["advantages"] = turn_broadcast(self._advantages, output["turn_ids"])
            self._show_advantages(self._advantages)
        return output

    def _show_advantages(self, advantages: Tensor) -> None:
        """Replace the outcome advantages in TRL's completions table by the mean over each trajectory's turns."""
        means = masked_mean(advantages, turn_mask(self._turn_ids), dim=1)
        shown = self.accelerator.gather(means).tolist()
        table = self._logs["advantages"]
        for _ in range(min(len(shown), len(table))):
            table.pop()
        table.extend(shown)

    def _turn_advantages(
        self, recorder: TurnRewardRecorder, rewards_per_func: Tensor, batch_size: int
    ) -> Tensor | None:
        """(B, K) of the local trajectories; `None` where TRL's own outcome advantages are the same thing."""
        wanted = torch.tensor(recorder.has_turn_rewards or self.args.gamma != 1.0, device=self.accelerator.device)
        if not self.accelerator.gather(wanted).any():
            return None
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"`multi_objective_aggregation` is {self.multi_objective_aggregation!r}, but turn rewards "
                "need 'sum_then_normalize'."
            )
        rank = self.accelerator.process_index
        local = slice(rank * batch_size, (rank + 1) * batch_size)
        turn_rewards = recorder.combine(rewards_per_func[local], self.reward_weights)
        scored = ~rewards_per_func[local].isnan().all(-1)
        mask = (turn_mask(self._turn_ids) & scored[:, None]).float()
        returns = turn_returns(turn_rewards, mask, self.args.gamma)
        advantages = self._group_advantages(self._gather_turns(returns), self._gather_turns(mask))
        return advantages[local, : returns.shape[1]]

    def _gather_turns(self, values: Tensor) -> Tensor:
        """(B, K) of every rank, one below the other, with 0 for the turns that a rank does not have."""
        return self.accelerator.gather(self.accelerator.pad_across_processes(values, dim=1))

    def _group_advantages(self, returns: Tensor, mask: Tensor) -> Tensor:
        """Group advantages over the whole batch, scaled as `scale_rewards` says."""
        num_generations = self.num_generations if self.model.training else self.num_generations_eval
        advantages = group_turn_advantages(returns, mask, num_generations, scale=self.scale_rewards == "group")
        if self.scale_rewards == "batch":
            advantages = advantages / (turn_std(returns, mask, len(returns)) + 1e-4)
        return advantages
