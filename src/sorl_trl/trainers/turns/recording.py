"""Keeps turns and rewards of a rollout while it passes through TRL, and makes a `ScoredRollout` of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn.functional import pad

from sorl_trl.methods import ScoredRollout
from sorl_trl.ops import TurnLayout, bounded_log_ratio, masked_mean, turn_layout
from sorl_trl.trainers.turns.rewards import TurnRewards
from sorl_trl.trainers.turns.states import Generated, state_keys
from sorl_trl.types import ActionKind, Trajectory

Rows = TypeVar("Rows", Tensor, list[Any])


class RolloutRecorder:
    """Keeps what TRL's output lacks: the turns as generated, and the rewards by turn and by function."""

    generated: Generated
    turns: TurnLayout
    """The turns of this process's rows."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._rewards_per_func: Tensor | None = None
        self.rewards = TurnRewards()

    def note_turns(self, turn_ids: Tensor, prompt_ids: Any, completion_ids: Any) -> None:
        """Keep the (B, T) turn ids, still on the host, of the completions that were just generated."""
        lengths = map(len, completion_ids)
        rows = [row[:length] for row, length in zip(turn_ids.tolist(), lengths, strict=True)]
        self.generated = Generated(prompt_ids, completion_ids, rows)
        on_host = turn_layout(turn_ids)
        self.turns = turn_layout(turn_ids.to(self._trainer.accelerator.device), on_host.num_turns)
        self.rewards.begin(rows, on_host.counts.tolist())
        self._rewards_per_func = None

    def note_rewards(self, rewards_per_func: Tensor) -> Tensor:
        """Keep all processes' (N, F) rewards, and return them with NaN for trajectories that cannot be scored.

        A trajectory without a token of the policy, such as one whose search was down, says nothing about the policy.
        An infinite reward would make the advantages of its whole group NaN. TRL leaves rows of NaN out of the baseline
        and gives them no advantage.
        """
        without_turn = self._trainer.accelerator.gather(self.turns.counts == 0)
        left_out = without_turn | rewards_per_func.isinf().any(1)
        self._rewards_per_func = torch.where(left_out.unsqueeze(1), torch.nan, rewards_per_func)
        unscored = self._rewards_per_func.isnan().all(1) & ~without_turn
        logged = self._trainer._metrics["train" if self._trainer.model.training else "eval"]
        logged["trajectories_without_turn"].append(without_turn.float().mean().item())
        logged["trajectories_unscored"].append(unscored.float().mean().item())
        return self._rewards_per_func

    def scored(self, batch: Mapping[str, Any], examples: Sequence[Mapping[str, Any]]) -> ScoredRollout:
        """The rollout of all processes, with the rewards that were noted last.

        `batch` is TRL's batch of this process's trajectories; `examples` are their rows of the dataset, including the
        columns that the rollout has added.

        Raises:
            ValueError: A subclass overrides `_calculate_rewards` without calling `super()`.
        """
        trainer, accelerator = self._trainer, self._trainer.accelerator
        if self._rewards_per_func is None:
            raise ValueError(
                f"`{type(trainer).__name__}._calculate_rewards` does not call `super()._calculate_rewards`, which "
                "keeps the rewards of turns: call it, or give your rewards as `reward_funcs`."
            )
        per_func = self._rewards_per_func
        weights = trainer.reward_weights.to(per_func.device)
        split = self.rewards.split(own_rows(per_func, len(self.turns.counts), accelerator), weights)
        turn_ids = gather_rows(accelerator, self.turns.turn_ids, padding=-1)
        is_training = trainer.model.training
        has_mismatch, own_turns = corrects_sampling(trainer), self.turns.turn_ids
        mismatch = gather_rows(accelerator, mismatch_of(batch, own_turns)) if has_mismatch else None
        return ScoredRollout(
            turns=turn_layout(turn_ids),
            rewards_per_func=per_func,
            reward_names=trainer.reward_func_names,
            reward_weights=weights,
            turn_rewards=gather_rows(accelerator, split.turn_rewards),
            has_turn_reward=gather_rows(accelerator, split.has_turn_reward),
            outcomes=accelerator.gather(split.outcomes),
            has_outcome=accelerator.gather(split.has_outcome),
            states=gather_rows(accelerator, state_keys(self.generated, self.turns)),
            num_generations=int(trainer.num_generations if is_training else trainer.num_generations_eval),
            gamma=trainer.args.gamma,
            scale=str(trainer.scale_rewards),
            void=self._void(examples),
            mismatch=mismatch,
        )

    def _void(self, examples: Sequence[Mapping[str, Any]]) -> Tensor | None:
        """(N,) bool: whether a turn was invalid. None unless every process knows the actions of its turns."""
        said = [row.get("trajectory") for row in examples]
        known = all(isinstance(each, Trajectory) for each in said)
        accelerator = self._trainer.accelerator
        void = [
            isinstance(each, Trajectory) and any(turn.action.kind is ActionKind.INVALID for turn in each.turns)
            for each in said
        ]
        both = torch.tensor([[known, each] for each in void], device=accelerator.device)
        gathered = accelerator.gather(both)
        return gathered[:, 1] if bool(gathered[:, 0].all()) else None


def kept_masks(trainer: Any, rollout: ScoredRollout, batch: Mapping[str, Any]) -> list[Tensor]:
    """What each piece of `keep` keeps of this process's rows: (B,) or (B, T) bool. The share that it keeps is logged.

    `rollout` has the rows of all processes, `batch` this process's rows. T is the width that TRL padded to.
    """
    masks = []
    rows, width = batch["completion_ids"].shape
    for piece in trainer.method.keep:
        keep = piece(rollout).bool()
        name = getattr(piece, "__name__", type(piece).__name__)
        share = keep if keep.dim() == 1 else keep[rollout.turns.loss_mask]
        trainer._metrics["train"][f"keep/{name}"].append(share.float().mean().item())
        own = own_rows(keep, rows, trainer.accelerator)
        if own.dim() == 2:
            own = pad(own[:, :width], (0, max(width - own.size(1), 0)), value=True)
        masks.append(own)
    return masks


def corrects_sampling(trainer: Any) -> bool:
    """Whether the loss is weighted by the ratio of the old policy to the sampler: vLLM, or an earlier policy."""
    args = trainer.args
    is_proximal = args.async_staleness > 0 and args.async_old_policy == "proximal" and trainer.model.training
    return is_proximal or trl_corrects_sampling(trainer)


def trl_corrects_sampling(trainer: Any) -> bool:
    """Whether TRL weights the loss, for which it scores every rollout."""
    return bool(trainer.use_vllm and trainer.vllm_importance_sampling_correction)


def trl_scores_old_policy(trainer: Any) -> bool:
    """Whether TRL runs the current policy over new trajectories before their first update."""
    return trainer.args.gradient_accumulation_steps % trainer.args.cycle_steps != 0 or trl_corrects_sampling(trainer)


def mismatch_of(batch: Mapping[str, Any], turn_ids: Tensor) -> Tensor:
    """(B, T) d_t = log π_old − log μ of each model token, bounded; 0 where it is NaN, and off the model tokens.

    An appended end-of-sequence token is not a model token, because the engine has not sampled it.
    """
    width = turn_ids.size(1)
    difference = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"])[:, :width]
    known = (turn_ids >= 0) & ~difference.isnan()
    return bounded_log_ratio(torch.where(known, difference, 0.0))


def own_rows(gathered: Rows, count: int, accelerator: Accelerator) -> Rows:
    """This process's `count` rows of a tensor or list that was gathered from all processes."""
    first = accelerator.process_index * count
    return gathered[first : first + count]


def gather_rows(accelerator: Accelerator, values: Tensor, padding: int = 0) -> Tensor:
    """Stack the (B, N) values of all processes, with `padding` where a process has fewer columns."""
    if values.dtype == torch.bool:  # accelerate would make integers of them, but only on the ranks that pad
        return gather_rows(accelerator, values.long(), padding).bool()
    return accelerator.gather(accelerator.pad_across_processes(values, dim=1, pad_index=padding))


def show_advantages(trainer: Any, advantages: Tensor, mask: Tensor) -> None:
    """Put the mean advantage of each trajectory, from all processes' (N, U), into TRL's table of completions."""
    shown = trainer._logs["advantages"]  # ends with TRL's own for these N, or as many of them as it has room for
    for _ in range(min(len(advantages), len(shown))):
        shown.pop()
    shown.extend(masked_mean(advantages, mask, dim=1).tolist())
