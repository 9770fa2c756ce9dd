"""SeeUPO (arXiv 2602.06554): updates the turns of a rollout one by one, the last one first.

TRL buffers the rollout as usual. State that changes from turn to turn is stored in the buffered micro-batches, so it
is shuffled, split and saved in checkpoints with their rows: the multiplier of each trajectory, the log-probabilities
at the start of the trained turn, and which turn that is.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from sorl_trl.agents.agent_rollout import AgentRollout
from sorl_trl.checks import SWITCH
from sorl_trl.methods import Method, MicroBatch
from sorl_trl.ops import backward_turn_advantages, bounded_log_ratio, masked_mean, next_multiplier, turn_broadcast
from sorl_trl.trainers.base import TurnLevelTrainer
from sorl_trl.trainers.batch import OLD_POLICY_STEP, ROW_SCALE, row_scale
from sorl_trl.trainers.config import TurnLevelConfig
from sorl_trl.trainers.forward import Pass
from sorl_trl.trainers.rollout import Rollout

MULTIPLIER = "turn_multiplier"
"""Field of a batch: (B,), M of each trajectory, the product of the ratios of its turns that were updated."""
TURN = "trained_turn"
"""Field of a batch: the turn that it was last prepared for; `num_iterations` before the first one."""
_ONLY: Mapping[str, tuple[Any, str]] = {
    "importance_sampling_level": ("turn", "the ratio must be that of the trained turn"),
    "async_staleness": (0, "the old log-probabilities of a turn are taken right before it is trained"),
    "scale_rewards": ("batch", "all trajectories with a turn are compared, regardless of group"),
    "multi_objective_aggregation": ("sum_then_normalize", "trajectories are compared by their total reward"),
    "gamma": (1.0, "trajectories are compared by their total reward, regardless of the turn"),
    "router_replay": ("none", "the old log-probabilities of a turn are taken right before it is trained"),
    "save_trajectories_steps": (0, "the files would show all turns but one as untrained"),
}
"""The only allowed value of a field, and why."""


@dataclass
class SeeUPOConfig(TurnLevelConfig):
    """Configuration of [`SeeUPOTrainer`]: [`TurnLevelConfig`] with defaults for training one turn at a time.

    Set `num_iterations` to the most turns that a trajectory can have: `max_turns` + 1 with `SearchRollout`,
    `max_tool_calling_iterations` + 1 in TRL's tool loop. Each iteration trains one turn, the last one first, and makes
    `steps_per_generation` / `gradient_accumulation_steps` updates, each on other trajectories. With one update, every
    ratio is 1, and nothing is clipped.

    Parameters:
        epsilon, scale_clip_range: As in TRL: 0.2, of turns of any length.
        target_kl: Off by default. The KL compares with the policy from before the trained turn's updates.
        scale_rewards: Must be "batch", the spread over all trajectories that have the turn.
    """

    epsilon: float = field(
        default=0.2,
        metadata={
            "help": "How far a ratio may fall below 1, and rise above it, before it is clipped (TRL's default)."
        },
    )
    scale_clip_range: Annotated[bool, SWITCH] = field(
        default=False, metadata={"help": "As in `TurnLevelConfig`; off by default, as in SeeUPO."}
    )
    target_kl: float = field(
        default=0.0,
        metadata={
            "help": "Our addition, not part of SeeUPO: as in `TurnLevelConfig`, with the KL to the policy from before "
            "the trained turn's updates. 0 (default) leaves the schedule unchanged."
        },
    )
    scale_rewards: str = field(
        default="batch",
        metadata={"help": "Must be 'batch': advantages are scaled by the spread over trajectories with the turn."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, (only, why) in _ONLY.items():
            if getattr(self, name) != only:
                raise ValueError(f"`{name}` is {getattr(self, name)!r}, but must be {only!r} with SeeUPO: {why}.")
        if self.loss_type not in ("turn", "grpo", "dr_grpo", "dapo"):
            raise ValueError(
                f"`loss_type` is {self.loss_type!r}, but must be 'turn', 'grpo', 'dr_grpo' or 'dapo' with SeeUPO: "
                "turns are trained one at a time, and a micro-batch may lack a turn."
            )
        if int(self.steps_per_generation or 1) % int(self.gradient_accumulation_steps):
            raise ValueError(
                f"`steps_per_generation` is {self.steps_per_generation}, but must be a multiple of "
                f"`gradient_accumulation_steps`, which is {self.gradient_accumulation_steps}: an update would mix two "
                "turns."
            )


class SeeUPOTrainer(TurnLevelTrainer):
    """SeeUPO, as known second-hand, with the interface of `trl.GRPOTrainer`.

    The trainer goes from the last turn that a trajectory can have down to the first. For each turn, it recomputes the
    old log-probabilities under the current policy, and one pass over the rollout's minibatches trains only the tokens
    of this turn, with PPO's clip on the turn's geometric ratio. The advantage compares the trajectory's reward with
    those of all trajectories that have this turn (`backward_turn_advantages`), and is multiplied by M, the product of
    the ratios of the turns that were updated before.

    A step on a turn that no trajectory has trains nothing: its gradient is dropped, so that momentum does not move the
    weights. DeepSpeed and fp16's gradient scaler still step, with a gradient of 0.

    Each rollout takes `num_iterations` passes with gradients and as many without; TRL also makes one of the latter.
    The pass after a turn's updates gives M's factor and the old log-probabilities of the turn before it.

    Metrics: `seeupo/turn`, the turn in training; `seeupo/trajectories_with_turn`, the share of trajectories that have
    it; `seeupo/multiplier_mean`, the mean of M over these.

    Example:

    ```python
    trainer = SeeUPOTrainer(
        model="Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=exact_match_reward,
        args=SeeUPOConfig(output_dir="out", num_iterations=3),  # `max_turns` 2, and the last generation
        train_dataset=dataset,
        rollout_func=SearchRollout(search, limits=RolloutLimits(max_turns=2)),
    )
    trainer.train()
    ```

    Raises:
        TypeError: `args` is not a `SeeUPOConfig`.
        ValueError: A trajectory can have more turns than `num_iterations`, or any reason of `SOGRPOTrainer`.
    """

    config_class: ClassVar[type[TurnLevelConfig]] = SeeUPOConfig
    default_method: ClassVar[str] = "grpo"  # PPO's clip, and nothing beside it
    args: SeeUPOConfig
    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "seeupo"]
    _name = "SeeUPO"
    # Known to us from a summary of its method, not from its text: no authors to cite.
    _paper: dict[str, str] = {"title": "SeeUPO", "id": "2602.06554"}  # noqa: RUF012 - TRL's is not a ClassVar

    def __init__(self, model: Any, reward_funcs: Any = None, args: Any = None, *positional: Any, **named: Any) -> None:
        super().__init__(model, reward_funcs, args, *positional, **named)
        self._check_method()
        rollout, calls = named.get("rollout_func"), self.args.max_tool_calling_iterations
        if isinstance(rollout, AgentRollout):
            calls = rollout.limits_under(self.args).max_turns
        elif not self.tools:
            calls = None
        if calls not in (None, sys.maxsize):  # if no option bounds the turns, each rollout is checked
            self._check_turns(calls + 1)

    def _check_turns(self, most: int) -> None:
        """Raise ValueError if trajectories can have turns that no iteration would train."""
        if most > self.num_iterations:
            raise ValueError(
                f"`num_iterations` is {self.num_iterations}, but must be {most} or more: a trajectory can have {most} "
                "turns, and SeeUPO trains one in each iteration."
            )

    def _check_method(self) -> None:
        if self.method.credit != Method().credit:
            raise ValueError(
                f"`credit` of the method is {self.method.credit!r}, but SeeUPO computes its own advantages."
            )

    # ---------------------------------------------------------------------------------------------------------------
    # The rollout
    # ---------------------------------------------------------------------------------------------------------------

    def _set_advantages(self, rollout: Rollout) -> Tensor:
        batch, scored = rollout.batch, rollout.scored
        if self.model.training:
            self._check_turns(scored.turns.num_turns)
        advantages = backward_turn_advantages(scored.rewards.sum(1), scored.turn_mask)
        batch["advantages"] = turn_broadcast(rollout.own(advantages), batch["turn_ids"])
        batch[MULTIPLIER] = torch.ones(len(batch["turn_ids"]), device=advantages.device)
        batch[TURN] = torch.tensor(self.num_iterations)
        return masked_mean(advantages, scored.turn_mask, dim=1)

    # ---------------------------------------------------------------------------------------------------------------
    # One turn after the other
    # ---------------------------------------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            return inputs
        # TRL goes `num_iterations` times over the micro-batches of a rollout.
        iteration = self._step // self.args.steps_per_generation % self.num_iterations
        turn = self.num_iterations - 1 - iteration
        if int(inputs[TURN]) != turn:
            self._begin_turn(turn)
        return turn_alone(inputs, turn)

    def _begin_turn(self, turn: int) -> None:
        """Prepare every buffered micro-batch for `turn`. All processes call this together."""
        buffered: list[dict[str, Any]] = self._buffered_inputs
        kept = [each["turn_ids"] == turn for each in buffered]
        local = torch.stack([torch.stack([is_turn.any(1).sum(), is_turn.sum()]) for is_turn in kept]).sum(0)
        rows, tokens = self.accelerator.gather(local.unsqueeze(0)).sum(0)
        total = sum(map(len, kept)) * self.accelerator.num_processes
        scale = torch.tensor(total / int(rows) if rows else 0.0, dtype=torch.float64)
        for each in buffered:
            if int(each[TURN]) < self.num_iterations:
                self._close_turn(each)
            each[TURN], each[ROW_SCALE] = torch.tensor(turn), scale
            each["num_items_in_batch"] = tokens
            each[OLD_POLICY_STEP] = torch.tensor(self.state.global_step)

    def _close_turn(self, inputs: dict[str, Any]) -> None:
        """After a turn's updates, one pass gives its new log-probabilities, and the next turn's old ones."""
        logps = self._score(self.model, inputs).logps
        log_ratio = bounded_log_ratio(logps - inputs["old_per_token_logps"])
        is_turn = inputs["turn_ids"] == int(inputs[TURN])
        inputs[MULTIPLIER] = next_multiplier(inputs[MULTIPLIER], log_ratio, is_turn)
        inputs["old_per_token_logps"] = logps

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        nobody_has_turn = row_scale(self._buffered_inputs[0]) == 0.0
        if nobody_has_turn and self.accelerator.scaler is None:
            self.model.zero_grad(set_to_none=True)  # the optimizer skips parameters without a gradient
        return loss

    def _own_term(self, batch: MicroBatch, scores: Pass) -> tuple[float, dict[str, Any]]:
        """Add no term, only metrics: which turn is trained, and the multipliers."""
        if not batch.is_training:
            return 0.0, {}
        has_turn, multiplier = batch.turns.counts > 0, batch.inputs[MULTIPLIER]
        return 0.0, {
            "seeupo/turn": torch.full_like(multiplier[0], int(batch.inputs[TURN])),
            "seeupo/trajectories_with_turn": has_turn.float().mean(),
            "seeupo/multiplier_mean": (multiplier, has_turn),
        }


def turn_alone(inputs: Mapping[str, Any], turn: int) -> dict[str, Any]:
    """A copy of a micro-batch that trains only `turn`, with its advantages times the multipliers.

    The policy reads the whole trajectories; only the mask of the loss changes.
    """
    is_turn = inputs["turn_ids"] == turn
    kept = inputs.get("tool_mask", torch.ones_like(inputs["completion_mask"]))
    return {
        **inputs,
        "tool_mask": kept * is_turn,
        "turn_ids": torch.where(is_turn, 0, -1),
        "turn_counts": (inputs["turn_counts"] > turn).long(),
        "advantages": inputs["advantages"] * inputs[MULTIPLIER].unsqueeze(1),
    }
