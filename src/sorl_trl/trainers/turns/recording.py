"""What a rollout gives, kept on its way through TRL: the turns that were generated, and what they earned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from sorl_trl.ops import TurnLayout, masked_mean, turn_layout
from sorl_trl.trainers.turns.rewards import RewardKinds, TurnRewardRecorder


@dataclass(frozen=True)
class Generated:
    """The token ids of B trajectories of one rank, on the host."""

    prompt_ids: Sequence[Sequence[int]]
    completion_ids: Sequence[Sequence[int]]
    turn_ids: Sequence[Sequence[int]]
    """The turn of each token of a completion, -1 on those that are not the policy's."""


@dataclass(frozen=True)
class ScoredRollout:
    """B trajectories of one rank with at most K turns each, and what F reward functions say of them."""

    turns: TurnLayout
    """As they were generated, before any trajectory is masked as truncated."""
    rewards_per_func: Tensor
    """(B, F) one reward per trajectory and function, NaN where it gave none."""
    turn_rewards: Tensor
    """(B, K) the weighted sum of all functions per turn; an outcome reward stands on the last turn."""
    scored: Tensor
    """(B,) bool, whether any function gave a reward."""
    has_turn_rewards: bool
    """Whether some function gave turn rewards to some trajectory of this rank."""
    generated: Generated
    kinds: RewardKinds | None = None
    """Turn rewards and outcomes apart, with `turn_reward_normalization='separate'`."""


class RolloutRecorder:
    """Stands around TRL's scoring of a rollout, whose reward functions may then return turn rewards.

    It stands around `_calculate_rewards` rather than overriding it, so that a subclass may replace that method as it
    may replace TRL's: its functions are recorded if it calls those of `reward_funcs`, and its rewards are outcomes if
    it does not.

    Args:
        trainer: a `GRPOTrainer`.
    """

    _generated: Generated
    _turns: TurnLayout
    _turn_counts: list[int]
    _rewards: TurnRewardRecorder
    _rewards_per_func: Tensor

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def generated(self, turn_ids: Tensor, generated: Generated) -> None:
        """Keep the (B, T) turn ids, still on the host, of the completions that were just generated, and these."""
        self._generated = generated
        on_host = turn_layout(turn_ids)
        self._turn_counts = on_host.counts.tolist()
        self._turns = turn_layout(turn_ids.to(self._trainer.accelerator.device), on_host.num_turns)

    @contextmanager
    def around_rewards(self) -> Iterator[None]:
        """Within it, TRL's call of `_calculate_rewards` is recorded."""
        attributes = vars(self._trainer)
        before = {name: attributes[name] for name in ("_calculate_rewards",) if name in attributes}
        attributes["_calculate_rewards"] = partial(self._record, self._trainer._calculate_rewards)
        try:
            yield
        finally:
            del attributes["_calculate_rewards"]
            attributes.update(before)

    def _record(self, calculate: Callable[..., Tensor], *args: Any) -> Tensor:
        """(all ranks' B, F) what `calculate` gives, with NaN for trajectories without a turn."""
        trainer = self._trainer
        self._rewards = recorder = TurnRewardRecorder(self._turn_counts)
        reward_funcs = trainer.reward_funcs
        trainer.reward_funcs = [
            recorder.wrap(func, index, name)
            for index, (func, name) in enumerate(zip(reward_funcs, trainer.reward_func_names, strict=True))
        ]
        try:
            rewards_per_func = calculate(*args)
        finally:
            trainer.reward_funcs = reward_funcs
        # A trajectory without a token of the policy (its search was down) says nothing about the policy: TRL leaves
        # rows of NaN out of the baseline and gives them no advantage.
        without_turn = trainer.accelerator.gather(self._turns.counts == 0)
        rewards_per_func = torch.where(without_turn.unsqueeze(1), torch.nan, rewards_per_func)
        mode = "train" if trainer.model.training else "eval"
        trainer._metrics[mode]["trajectories_without_turn"].append(without_turn.float().mean().item())
        count = len(self._turn_counts)
        first = trainer.accelerator.process_index * count
        self._rewards_per_func = rewards_per_func[first : first + count]
        return rewards_per_func

    def scored(self) -> ScoredRollout:
        """The rollout whose rewards were recorded last."""
        rewards, weights = self._rewards_per_func, self._trainer.reward_weights
        is_separate = self._trainer.args.turn_reward_normalization == "separate"
        return ScoredRollout(
            turns=self._turns,
            rewards_per_func=rewards,
            turn_rewards=self._rewards.combine(rewards, weights),
            scored=~rewards.isnan().all(-1),
            has_turn_rewards=self._rewards.has_turn_rewards,
            generated=self._generated,
            kinds=self._rewards.kinds(rewards, weights) if is_separate else None,
        )


def gather_rows(accelerator: Accelerator, values: Tensor, padding: int = 0) -> Tensor:
    """(B, N) of every rank, one below the other, with `padding` where a rank has fewer columns."""
    if values.dtype == torch.bool:  # accelerate would make integers of it, and only on the ranks where it pads
        return gather_rows(accelerator, values.long(), padding).bool()
    return accelerator.gather(accelerator.pad_across_processes(values, dim=1, pad_index=padding))


def show_advantages(trainer: Any, advantages: Tensor, mask: Tensor) -> None:
    """Replace the advantages in TRL's completions table by the mean of each trajectory's, both (B, N)."""
    shown = trainer.accelerator.gather(masked_mean(advantages, mask, dim=1)).tolist()
    table = trainer._logs["advantages"]
    for _ in range(min(len(shown), len(table))):
        table.pop()
    table.extend(shown)
