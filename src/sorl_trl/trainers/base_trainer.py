"""The turn-level policy loss on top of `trl.GRPOTrainer`, shared by every trainer of this package.

TRL 1.16's private methods are overridden narrowly: `super()` plus what differs, which objects that the trainer holds
do. docs/architecture.md lists them, and tests/contract fails when one of their bodies changes."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from trl import GRPOTrainer

from sorl_trl.caller_warnings import warnings_at_the_caller
from sorl_trl.ops import TurnLayout, turn_counts
from sorl_trl.trainers.agents.native_tools import HarmlessTools
from sorl_trl.trainers.base_config import AGGREGATED_AS, MINIRL_LOSS_TYPE, TurnLevelConfig
from sorl_trl.trainers.checked_options import StartWarnings, check_arguments, level_said, warn_of_idle_options
from sorl_trl.trainers.checks.dataset import (
    check_answer_column,
    check_chat_template,
    check_column_names,
    check_dataset_size,
)
from sorl_trl.trainers.checks.training_noise import disable_noise
from sorl_trl.trainers.checks.trl_arguments import called_as, trainer_arguments
from sorl_trl.trainers.cycle.trainer import CycleTrainer
from sorl_trl.trainers.loss.bias_norm import build_bias_normalizer, clipping_bias_of
from sorl_trl.trainers.loss.kl_schedule import KLSchedule
from sorl_trl.trainers.loss.llds import count_good_tokens, llds
from sorl_trl.trainers.loss.metric_log import MetricLog
from sorl_trl.trainers.loss.micro_batch import (
    ClipRange,
    ClipRanges,
    MicroBatch,
    Observer,
    advantages_of,
    age_of,
    clip_ranges,
    loss_mask_of,
    row_scale,
    turns_of,
)
from sorl_trl.trainers.loss.mismatch import mismatch_log_ratio
from sorl_trl.trainers.loss.range_watch import RangeWatch
from sorl_trl.trainers.loss.ratio_substitution import RatioSubstitution, open_clip_range
from sorl_trl.trainers.loss.so_loss import has_own_surrogate, log_ratio_of_units, penalty, surrogate
from sorl_trl.trainers.options.loss import TURN_MODES
from sorl_trl.trainers.turns.dropping import counting_kept_rows
from sorl_trl.trainers.turns.engine_mismatch import correct_mismatch, corrects_by_turn
from sorl_trl.trainers.turns.information_gain import InformationGain
from sorl_trl.trainers.turns.recording import Generated, RolloutRecorder, ScoredRollout
from sorl_trl.trainers.turns.refill import GroupRefill, ScoredBatch, check_refill
from sorl_trl.trainers.turns.selection import check_selection, select
from sorl_trl.trainers.turns.spans import check_turn_ids, checked_rollout, split_at_tags, turn_ids_of
from sorl_trl.trainers.turns.trajectory_dump import TrajectoryDump


class TurnLevelTrainer(CycleTrainer):
    """`GRPOTrainer` with turn spans, turn-level importance ratios and clipping-triggered normalization.

    Subclasses decide where the advantages come from. The arguments are those of `GRPOTrainer`.
    """

    config_class: ClassVar[type[TurnLevelConfig]] = TurnLevelConfig
    args: TurnLevelConfig
    epsilon_low: float
    epsilon_high: float

    @called_as(GRPOTrainer.__init__)
    def __init__(self, *positional: Any, **named: Any) -> None:
        given = trainer_arguments(*positional, **named)
        if given.get("args") is None:
            given["args"] = self._default_config(given["model"])
        args = given["args"]
        if not isinstance(args, self.config_class):
            raise TypeError(f"`args` is a {type(args).__name__}, but must be a {self.config_class.__name__}.")
        check_arguments(given)
        if given.get("rollout_func") is not None:
            given["rollout_func"] = checked_rollout(given["rollout_func"])
        self._tools = HarmlessTools(self)
        self._recorder = RolloutRecorder(self)
        self._substitution: RatioSubstitution | None = None
        with warnings_at_the_caller(), level_said(args):
            super().__init__(args.rollout_staleness, **given)
        if args.disable_dropout:
            disable_noise(self.model)
        warn_of_idle_options(args, bool(self.tools))
        self.add_callback(StartWarnings())
        check_selection(args, self.reward_func_names, self.rollout_func is not None)
        check_refill(args, self.train_dataset)
        self._refill = GroupRefill(self, self._scored_with_advantages)
        self._set_up_loss(args)
        self._information_gain = InformationGain(self) if args.information_gain_coef else None
        check_column_names(self.train_dataset, self.eval_dataset, args)
        check_answer_column(self.train_dataset, self.eval_dataset, args)
        check_dataset_size(self.train_dataset, args)
        if self.rollout_func is None:  # a rollout function may render messages in its own way
            check_chat_template(self.train_dataset, self.processing_class)

    def _default_config(self, model: Any) -> TurnLevelConfig:
        name = model if isinstance(model, str) else model.config._name_or_path
        return self.config_class(f"{name.split('/')[-1]}-{type(self).__name__.removesuffix('Trainer')}")

    def _set_up_loss(self, args: TurnLevelConfig) -> None:
        # What TRL's loss is told instead of our names: RatioSubstitution makes up the difference.
        self.importance_sampling_level = "token" if args.ratio_level == "turn" else args.ratio_level
        if args.vllm_importance_sampling_mode in TURN_MODES:
            self.vllm_importance_sampling_mode = "token_truncate"
        self.loss_type = AGGREGATED_AS.get(args.loss_type, args.loss_type)
        self._bias_normalizer = build_bias_normalizer(self)
        self._metric_log = MetricLog(args, self.accelerator, self._metrics)
        self._dump = TrajectoryDump(args, self._tokenizer)
        self.add_callback(self._dump)
        watch = RangeWatch(args, self._metric_log)
        self.add_callback(watch)
        self._observers: list[Observer] = [self._metric_log, watch, self._dump]
        if args.target_kl:
            schedule = KLSchedule(args.target_kl, self.accelerator, self._record_lr_factor)
            self.add_callback(schedule)
            self._observers.append(schedule)

    # ---------------------------------------------------------------------------------------------------------------
    # The rollout: turns, rewards, advantages
    # ---------------------------------------------------------------------------------------------------------------

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        self._tools.clean_prompts(prompts)
        result = super()._generate(prompts)
        prompt_ids, completion_ids, env_mask, _, _, extra_fields, *_ = result
        turn_ids = turn_ids_of(completion_ids, env_mask, extra_fields.get("turn_ids"))
        check_turn_ids(turn_ids, completion_ids, env_mask)
        if self.args.turn_boundary == "tags":
            turn_ids = split_at_tags(turn_ids, completion_ids, self._tokenizer, self.args.turn_boundary_tags)
        # Reward functions see the turns they are asked to reward.
        lengths = map(len, completion_ids)
        extra_fields["turn_ids"] = [row[:length] for row, length in zip(turn_ids.tolist(), lengths, strict=True)]
        self._recorder.generated(turn_ids, Generated(prompt_ids, completion_ids, extra_fields["turn_ids"]))
        return result

    def _tool_call_loop(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return self._tools.masked(super()._tool_call_loop(*args, **kwargs))

    def _get_tool_suffix_ids(self, tool_messages: list[dict[str, Any]]) -> list[int]:
        return self._tools.suffix_ids(super()._get_tool_suffix_ids, tool_messages)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.args.group_refill and self.model.training:
            batch = self._refill.fill(inputs)
            output, inputs, rewards = batch.output, batch.examples, batch.rewards_per_func
            select(self, output, rewards, inputs)
        else:
            output, rollout = self._scored(inputs)
            rewards = rollout.rewards_per_func
            select(self, output, rewards, inputs)
            self._add_advantages(output, rollout)
        if self._corrects_sampling() and (corrects_by_turn(self.args) or self.args.mismatch_veto is not None):
            correct_mismatch(self, output)
        if self.args.llds_coef:
            count_good_tokens(output, self.accelerator)
        self._dump.prepare(output, inputs, rewards, self.reward_weights)
        output["turn_counts"] = turn_counts(output["turn_ids"]).cpu()
        return output

    def _scored_with_advantages(self, inputs: list[dict[str, Any]]) -> ScoredBatch:
        output, rollout = self._scored(inputs)
        self._add_advantages(output, rollout)
        return ScoredBatch(output, inputs, rollout.rewards_per_func)

    def _scored(self, inputs: list[dict[str, Any]]) -> tuple[dict[str, Any], ScoredRollout]:
        """TRL's batch of a rollout, with its turns."""
        self._tools.note_prompts(inputs)
        self.rollout_examples: Any = inputs
        with self._recorder.around_rewards():
            output = super()._generate_and_score_completions(inputs)
        self.rollout_examples = None  # TRL has put trajectories into them
        rollout = self._recorder.scored()
        if self._information_gain is not None:
            rollout = self._information_gain.added_to(rollout, inputs)
        loss_mask = loss_mask_of(output)
        turn_ids = loss_mask.new_full(loss_mask.shape, -1)
        generated = rollout.turns.turn_ids
        turn_ids[:, : generated.shape[1]] = generated  # TRL may have padded to a multiple
        output["turn_ids"] = torch.where(loss_mask.bool(), turn_ids, -1)
        output["generated_at_step"] = torch.tensor(self.state.global_step)
        return output, rollout

    def _add_advantages(self, output: dict[str, Any], rollout: ScoredRollout) -> None:
        """Put advantages into the batch that TRL has made of a rollout, where its own are not those of the method."""

    # ---------------------------------------------------------------------------------------------------------------
    # The loss
    # ---------------------------------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any, Any]:
        logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._substitution is not None:
            logps = self._substitution(logps)
        return logps, entropies, aux_loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """TRL's loss with our ratios and surrogate, and the terms that are ours: see `so_loss`."""
        turns = turns_of(inputs)
        ranges = self._clip_ranges(turns)
        with counting_kept_rows(self, inputs) as counted:
            self._substitution = substitution = self._build_substitution(counted, turns, ranges)
            try:
                with nullcontext() if substitution.surrogate is None else open_clip_range(self):
                    loss = super()._compute_loss(model, substitution.inputs)
            finally:
                self._substitution = None
        is_training = self.model.training
        batch = MicroBatch(
            log_ratio=substitution.log_ratio,
            turns=turns,
            advantages=advantages_of(inputs),
            clip_ranges=ranges,
            inputs=inputs,
            has_own_surrogate=substitution.surrogate is not None,
            is_training=is_training,
            step=self.state.global_step + 1,
            age=age_of(inputs, self.state.global_step) if is_training else None,
            ends_step=self.accelerator.sync_gradients or not is_training,
        )
        loss = self._with_own_terms(loss, batch)
        for observer in self._observers:
            observer.observe(batch)
        return loss

    def _clip_ranges(self, turns: TurnLayout) -> ClipRanges:
        """As they are now: the trainer's attributes may be set in the middle of a run."""
        of_token = ClipRange(self.epsilon_low, self.epsilon_high, self.args.delta)
        return clip_ranges(of_token, turns, self.args.ratio_level, self.args.clip_range_scaling_in_use)

    def _build_substitution(self, inputs: dict[str, Any], turns: TurnLayout, ranges: ClipRanges) -> RatioSubstitution:
        known: dict[str, Any] = {"turns": turns, "advantages": advantages_of(inputs), "args": self.args}
        is_own = has_own_surrogate(self.args, of_tokens=inputs["advantages"].dim() > 1)
        given = {**known, "clip_range": ranges.units}
        if self.args.loss_type == MINIRL_LOSS_TYPE and self._corrects_sampling():
            given["mismatch"] = mismatch_log_ratio(inputs).exp()
            inputs = {**inputs, "importance_sampling_ratio": given["mismatch"].new_ones(1)}  # it is in the weights
        # VESPO weighs whole sequences from token log-ratios by itself, whatever the level.
        has_turn_ratios = self.args.ratio_level == "turn" and self.loss_type != "vespo"
        return RatioSubstitution(
            inputs,
            turns,
            units=partial(log_ratio_of_units, **known) if is_own or has_turn_ratios else None,
            surrogate=partial(surrogate, **given) if is_own else None,
            linear=self.loss_type in ("cispo", "vespo"),
            tracks_sampling=self.off_policy_mask_threshold is not None,
        )

    def _with_own_terms(self, loss: Tensor, batch: MicroBatch) -> Tensor:
        """The loss with what the method adds to TRL's, scaled for gradient accumulation as TRL's is."""
        if self.args.llds_coef:
            guard = llds(batch, self._parts_of_rollout(), self._metric_log)
            loss = loss + self.args.llds_coef * guard / self._micro_batches()
        if self.args.clip_normalization == "kl_penalty":
            of_trajectories, gate = penalty(batch, self.args)
            mean_penalty = of_trajectories.mean() * row_scale(batch.inputs)
            self._metric_log.add_rank_mean("clip_penalty", mean_penalty)
            self._metric_log.add_rank_mean("clip_penalty_gate", gate.mean())
            return loss + self.args.ctn_coef * mean_penalty / self._micro_batches()
        if self._bias_normalizer is not None and batch.is_training and batch.log_ratio.requires_grad:
            weights = batch.inputs["importance_sampling_ratio"] if self._corrects_sampling() else None
            bias, any_clipped = clipping_bias_of(batch, weights, self.args)
            self._bias_normalizer.add(bias * row_scale(batch.inputs) / self._micro_batches(), any_clipped)
        return loss

    def _record_lr_factor(self, factor: float) -> None:
        self._metrics["train"]["lr_factor"].append(factor)

    def _corrects_sampling(self) -> bool:
        """Whether TRL weighs the surrogate by the ratio of the old policy to vLLM."""
        return bool(self.use_vllm and self.vllm_importance_sampling_correction)

    def _micro_batches(self) -> float:
        """By what TRL divides the loss of a micro-batch."""
        return float(self.current_gradient_accumulation_steps) if self.model.training else 1.0

    def _parts_of_rollout(self) -> int:
        """In how many micro-batches, of all ranks, TRL splits what was generated together."""
        of_rank = self.args.steps_per_generation if self.model.training else 1
        return self.accelerator.num_processes * int(of_rank or 1)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self._bias_normalizer is not None and self.accelerator.sync_gradients:
            self._metrics["train"]["clipping_bias_norm"].append(self._bias_normalizer.normalize(self.accelerator))
        return loss
