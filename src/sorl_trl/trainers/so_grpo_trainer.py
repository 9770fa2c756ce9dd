"""SO-GRPO: GRPO with turn-level group advantages, and SORL's turn-level ratios and normalization as switches."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from sorl_trl.ops import (
    group_spread,
    group_turn_advantages,
    is_shared_state,
    kept_groups,
    leave_one_out_advantages,
    masked_mean,
    separate_turn_advantages,
    state_advantages,
    turn_broadcast,
    turn_returns,
    turn_std,
)
from sorl_trl.trainers.base_trainer import TurnLevelTrainer
from sorl_trl.trainers.loss.turn_metrics import MetricSums
from sorl_trl.trainers.paper import SORL_PAPER
from sorl_trl.trainers.so_grpo_config import SOGRPOConfig
from sorl_trl.trainers.turns.recording import ScoredRollout, gather_rows, show_advantages
from sorl_trl.trainers.turns.states import state_keys


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
        if rollout.kinds is not None:
            self._log_rewarded(rollout.kinds.has_turn_reward, self._scored_turns(rollout))
        if advantages is not None:
            output["advantages"] = turn_broadcast(advantages, output["turn_ids"])
            show_advantages(self, advantages, rollout.turns.turn_mask)
        elif self.args.llds_coef > 0:
            output["advantages"] = self._without_rounding(output["advantages"], rollout)

    def _without_rounding(self, advantages: Tensor, rollout: ScoredRollout) -> Tensor:
        """(B,) TRL's advantages, exactly 0 in groups whose rewards are equal: LLDS asks for their sign.

        In float32 the mean of eight rewards of 0.1 is not 0.1, and 1 / (σ + 1e-4) makes the difference 1e-4 and more.
        """
        if self.multi_objective_aggregation != "sum_then_normalize":  # equal rewards may have other advantages than 0
            return advantages
        rewards = torch.where(rollout.scored, rollout.turn_rewards.sum(1), torch.nan)
        spread = group_spread(self.accelerator.gather(rewards), self._group_size)
        differs = kept_groups(spread, "zero_variance").repeat_interleave(self._group_size)
        return torch.where(self._own_rows(differs, len(rewards)), advantages, 0.0)

    def _own_rows(self, of_all: Tensor, count: int) -> Tensor:
        """This process's `count` rows of what was gathered."""
        first = self.accelerator.process_index * count
        return of_all[first : first + count]

    def _turn_advantages(self, rollout: ScoredRollout) -> Tensor | None:
        """(B, K) of the local trajectories; `None` where TRL's own outcome advantages are the same thing."""
        if not self._needs_turns(rollout):
            return None
        mask = self._scored_turns(rollout).float()
        rows = partial(gather_rows, self.accelerator)
        returns, kept = rows(turn_returns(rollout.turn_rewards, mask, self.args.gamma)), rows(mask)
        if rollout.kinds is None:
            advantages = self._group_advantages(returns, kept)
        else:
            kinds = [(rows(rewards), rows(has_reward)) for rewards, has_reward in rollout.kinds.pairs]
            gamma, scale = self.args.gamma, str(self.scale_rewards)
            advantages = separate_turn_advantages(kinds, kept, self._group_size, gamma, scale)
        if self.args.step_advantage_coef > 0:
            states = rows(state_keys(rollout.generated, rollout.turns))
            advantages = advantages + self.args.step_advantage_coef * self._step_advantages(returns, states, kept)
        return self._own_rows(advantages, len(mask))[:, : mask.shape[1]]

    @staticmethod
    def _scored_turns(rollout: ScoredRollout) -> Tensor:
        """(B, K) bool, the turns of trajectories with a reward."""
        return rollout.turns.turn_mask & rollout.scored[:, None]

    def _needs_turns(self, rollout: ScoredRollout) -> bool:
        """Whether turns of any rank's trajectories may have advantages of their own."""
        args = self.args
        is_ours = args.gamma != 1.0 or args.group_baseline != "mean" or args.step_advantage_coef > 0
        here = rollout.has_turn_rewards or is_ours
        anywhere = self.accelerator.gather(torch.tensor(here, device=self.accelerator.device)).any()
        if anywhere and self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                f"`multi_objective_aggregation` is {self.multi_objective_aggregation!r}, but turn rewards "
                "need 'sum_then_normalize'."
            )
        return bool(anywhere)

    @property
    def _group_size(self) -> int:
        return int(self.num_generations if self.model.training else self.num_generations_eval)

    def _step_advantages(self, returns: Tensor, states: Tensor, mask: Tensor) -> Tensor:
        """GiGPO's, over the whole batch, scaled as `scale_rewards` says; how many turns share a state is logged."""
        mode = "train" if self.model.training else "eval"
        is_shared = is_shared_state(states, mask, self._group_size)
        self._metrics[mode]["turns/shared_state"].append(masked_mean(is_shared.float(), mask).item())
        scale = self.scale_rewards == "group"
        return self._over_batch(state_advantages(returns, states, mask, self._group_size, scale), returns, mask)

    def _group_advantages(self, returns: Tensor, mask: Tensor) -> Tensor:
        """Group advantages over the whole batch, scaled as `scale_rewards` says."""
        if self.args.group_baseline == "leave_one_out":
            self._log_alone(mask.bool().any(1), self._group_size)
            return leave_one_out_advantages(returns, mask, self._group_size)
        scale = self.scale_rewards == "group"
        return self._over_batch(group_turn_advantages(returns, mask, self._group_size, scale), returns, mask)

    def _over_batch(self, advantages: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
        """The advantages, divided by the spread of the batch's returns where `scale_rewards` is "batch"."""
        if self.scale_rewards == "batch":
            return advantages / (turn_std(returns, mask, len(returns)) + 1e-4)
        return advantages

    def _log_alone(self, counted: Tensor, num_generations: int) -> None:
        """Log the share of the trajectories that nothing can be compared with, of those (all ranks' B,) counted."""
        groups = counted.view(-1, num_generations).sum(1)
        mode = "train" if self.model.training else "eval"
        share = (groups == 1).sum() / groups.sum().clamp(min=1)
        self._metrics[mode]["advantages/without_baseline"].append(share.item())

    def _log_rewarded(self, has_reward: Tensor, turns: Tensor) -> None:
        """Log the share of all ranks' `turns` with a turn reward, both (B, K): without any there is one kind alone."""
        sums = MetricSums()
        sums.add_mean("turns/rewarded", has_reward.float(), turns)
        mode = "train" if self.model.training else "eval"
        for name, value in sums.reduce(self.accelerator).items():
            self._metrics[mode][name].append(value)
