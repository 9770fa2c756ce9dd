"""What reward functions say, kept beside what TRL makes of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from sorl_trl.ops import turn_counts
from sorl_trl.trainers.turns.rewards import TurnRewardRecorder


class RewardRecording(GRPOTrainer):
    """`GRPOTrainer` whose reward functions may return turn rewards.

    It stands around `_calculate_rewards` rather than overriding it, so that a subclass may replace that method as it
    may replace TRL's: its functions are recorded if it calls those of `reward_funcs`, and its rewards are outcomes if
    it does not.
    """

    reward_funcs: list[Any]
    _turn_ids: Tensor
    """(B, T) of the completions that were generated last, before any of them is masked as truncated."""
    _turn_rewards: TurnRewardRecorder
    _rewards_per_func: Tensor
    """(B, F) of this rank's completions that were generated last, NaN where a function gave none."""

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        attributes = self.__dict__
        before = {name: attributes[name] for name in ("_calculate_rewards",) if name in attributes}
        attributes["_calculate_rewards"] = partial(self._record_rewards, self._calculate_rewards)
        try:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        finally:
            del attributes["_calculate_rewards"]
            attributes.update(before)
        return output

    def _record_rewards(self, calculate: Callable[..., Tensor], *args: Any) -> Tensor:
        """(all ranks' B, F) what `calculate` gives, with NaN for trajectories without a turn."""
        self._turn_rewards = recorder = TurnRewardRecorder(turn_counts(self._turn_ids).tolist())
        reward_funcs = self.reward_funcs
        self.reward_funcs = [
            recorder.wrap(func, index, name)
            for index, (func, name) in enumerate(zip(reward_funcs, self.reward_func_names, strict=True))
        ]
        try:
            rewards_per_func = calculate(*args)
        finally:
            self.reward_funcs = reward_funcs
        # A trajectory without a token of the policy (its search was down) says nothing about the policy: TRL leaves
        # rows of NaN out of the baseline and gives them no advantage.
        without_turn = self.accelerator.gather((self._turn_ids < 0).all(-1))
        rewards_per_func[without_turn] = torch.nan
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["trajectories_without_turn"].append(without_turn.float().mean().item())
        count = len(self._turn_ids)
        first = self.accelerator.process_index * count
        self._rewards_per_func = rewards_per_func[first : first + count]
        return rewards_per_func

    def _local_turn_rewards(self) -> tuple[Tensor, Tensor]:
        """Of this rank: (B, K) weighted turn rewards, outcomes on the last turn, and (B,) whether scored at all."""
        turn_rewards = self._turn_rewards.combine(self._rewards_per_func, self.reward_weights)
        return turn_rewards, ~self._rewards_per_func.isnan().all(-1)
