"""The turn-level policy loss on top of `trl.GRPOTrainer`, shared by every trainer of this package.

TRL 1.16's private methods are overridden narrowly: `super()` plus what differs. docs/architecture.md lists them, and
tests/contract fails when one of their bodies changes.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from trl import GRPOTrainer

from sorl_trl.ops import (
    clipping_bias,
    gated_kl,
    importance_ratio,
    is_clipped,
    masked_mean,
    turn_ids_from_mask,
    turn_weights,
    validate_turn_ids,
)
from sorl_trl.trainers.agents.native_tools import NativeTools
from sorl_trl.trainers.base_config import TURN_LOSS_TYPE, TurnLevelConfig
from sorl_trl.trainers.checked_options import CheckedOptions
from sorl_trl.trainers.checks.caller_warnings import warnings_at_the_caller
from sorl_trl.trainers.checks.dataset import check_chat_template, check_column_names, check_dataset_size
from sorl_trl.trainers.checks.trl_arguments import called_as, trainer_arguments
from sorl_trl.trainers.cycle.exact_resume import ExactResume
from sorl_trl.trainers.cycle.roll_back import RollBack
from sorl_trl.trainers.loss.bias_norm import ClippingBiasNormalizer
from sorl_trl.trainers.loss.clip_penalty import penalty_gate
from sorl_trl.trainers.loss.kl_schedule import KLSchedule
from sorl_trl.trainers.loss.ratio_substitution import RatioSubstitution
from sorl_trl.trainers.loss.turn_metrics import turn_metrics
from sorl_trl.trainers.turns.recording import RewardRecording
from sorl_trl.trainers.turns.spans import checked_rollout, padded, split_at_tags, turn_ids_of
from sorl_trl.trainers.turns.trajectory_dump import TrajectoryDump


class TurnLevelTrainer(CheckedOptions, NativeTools, RewardRecording, ExactResume, RollBack):
    """`GRPOTrainer` with turn spans, turn-level importance ratios and clipping-triggered normalization.

    Subclasses decide where the advantages come from. The arguments are those of `GRPOTrainer`.
    """

    config_class: ClassVar[type[TurnLevelConfig]] = TurnLevelConfig
    args: TurnLevelConfig

    @called_as(GRPOTrainer.__init__)
    def __init__(self, *positional: Any, **named: Any) -> None:
        given = trainer_arguments(*positional, **named)
        if given.get("args") is None:
            given["args"] = self._default_config(given["model"])
        args = given["args"]
        if not isinstance(args, self.config_class):
            raise TypeError(f"`args` is a {type(args).__name__}, but must be a {self.config_class.__name__}.")
        if given.get("rollout_func") is not None:
            given["rollout_func"] = checked_rollout(given["rollout_func"])
        with warnings_at_the_caller():
            super().__init__(**given)

        # What TRL's loss is told instead of our names: RatioSubstitution and turn_weights make up the difference.
        if args.importance_sampling_level == "turn":
            self.importance_sampling_level = "token"
        if args.loss_type == TURN_LOSS_TYPE:
            self.loss_type = "grpo"
        self.rollout_staleness = args.rollout_staleness
        self._substitution: RatioSubstitution | None = None
        self._bias_normalizer = self._build_bias_normalizer()
        self._dump = TrajectoryDump(args, self._tokenizer, (self.epsilon_low, self.epsilon_high))
        self.add_callback(self._dump)
        self._kl_schedule = KLSchedule(args.target_kl) if args.target_kl else None
        if self._kl_schedule is not None:
            self.add_callback(self._kl_schedule)
        check_column_names(self.train_dataset, self.eval_dataset, args)
        check_dataset_size(self.train_dataset, args)
        if self.rollout_func is None:  # a rollout function may render messages in its own way
            check_chat_template(self.train_dataset, self.processing_class)

    def _default_config(self, model: Any) -> TurnLevelConfig:
        name = model if isinstance(model, str) else model.config._name_or_path
        return self.config_class(f"{name.split('/')[-1]}-{type(self).__name__.removesuffix('Trainer')}")

    def _build_bias_normalizer(self) -> ClippingBiasNormalizer | None:
        if self.args.clip_normalization != "bias_norm":
            return None
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:
            raise ValueError(
                "`clip_normalization='bias_norm'` rescales the gradient between backward and optimizer step, where "
                "DeepSpeed and FSDP keep it in shards of their own. Use `clip_normalization='kl_penalty'`, or DDP."
            )
        return ClippingBiasNormalizer(self.model.parameters())

    # ---------------------------------------------------------------------------------------------------------------
    # Turn spans: from the rollout to the loss
    # ---------------------------------------------------------------------------------------------------------------

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        result = super()._generate(prompts)
        _, completion_ids, env_mask, _, _, extra_fields, *_ = result
        turn_ids = turn_ids_of(completion_ids, env_mask, extra_fields.get("turn_ids"))
        self._check_turn_ids(turn_ids, completion_ids, env_mask)
        if self.args.turn_boundary == "tags":
            turn_ids = split_at_tags(turn_ids, completion_ids, self._tokenizer, self.args.turn_boundary_tags)
        # Reward functions see the turns they are asked to reward.
        lengths = map(len, completion_ids)
        extra_fields["turn_ids"] = [row[:length].tolist() for row, length in zip(turn_ids, lengths, strict=True)]
        self._turn_ids = turn_ids.to(self.accelerator.device)
        return result

    def _check_turn_ids(self, turn_ids: Tensor, completion_ids: Any, env_mask: Any) -> None:
        """Raise where tools have lengthened a completion whose turns `rollout_func` had recorded."""
        lengths = [len(ids) for ids in completion_ids]
        mask = env_mask if env_mask is not None else [[1] * length for length in lengths]
        if turn_ids.shape[1] != max(lengths):
            raise ValueError(
                f"`rollout_func` recorded turns over {turn_ids.shape[1]} tokens, but completions have up to "
                f"{max(lengths)}: `tools` went on after it. Use one or the other."
            )
        validate_turn_ids(turn_ids, padded(mask, 0))

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        loss_mask = loss_mask_of(output)
        turn_ids = loss_mask.new_full(loss_mask.shape, -1)
        turn_ids[:, : self._turn_ids.shape[1]] = self._turn_ids  # TRL may have padded to a multiple
        output["turn_ids"] = torch.where(loss_mask.bool(), turn_ids, -1)
        output["generated_at_step"] = torch.tensor(self.state.global_step)
        self._dump.prepare(output, inputs, self._rewards_per_func, self.reward_weights)
        return output

    # ---------------------------------------------------------------------------------------------------------------
    # The loss
    # ---------------------------------------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Any, Any]:
        logps, entropies, aux_loss = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._substitution is not None:
            logps = self._substitution(logps)
        return logps, entropies, aux_loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        turn_ids = inputs.get("turn_ids")
        if turn_ids is None:
            turn_ids = turn_ids_from_mask(loss_mask_of(inputs))
        self._substitution = substitution = self._build_substitution(inputs, turn_ids)
        advantages = inputs["advantages"]
        advantages = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
        if self.args.loss_type == TURN_LOSS_TYPE:
            # TRL's "grpo" takes the token mean of each trajectory; the surrogate is linear in its advantages, so
            # weighted advantages turn that into the mean over turns. The reference KL stays a token mean.
            substitution.inputs["advantages"] = advantages * turn_weights(turn_ids)
        try:
            loss = super()._compute_loss(model, substitution.inputs)
        finally:
            self._substitution = None
        log_ratio = substitution.log_ratio
        self._log_turn_metrics(log_ratio.detach(), turn_ids, advantages, inputs)
        if self.args.clip_normalization == "kl_penalty":
            loss = loss + self._clip_penalty(log_ratio, turn_ids)
        elif self._bias_normalizer is not None and self.model.training and log_ratio.requires_grad:
            if self.use_vllm and self.vllm_importance_sampling_correction:  # as TRL weighs the surrogate
                advantages = advantages * inputs["importance_sampling_ratio"]
            self._add_clipping_bias(self._bias_normalizer, log_ratio, turn_ids, advantages)
        return loss

    def _build_substitution(self, inputs: dict[str, Any], turn_ids: Tensor) -> RatioSubstitution:
        # VESPO weighs whole sequences from token log-ratios by itself, whatever the level.
        substitutes = self.args.importance_sampling_level == "turn" and self.loss_type != "vespo"
        return RatioSubstitution(
            inputs,
            turn_ids,
            turn_ratio=self.args.turn_ratio if substitutes else None,
            linear=self.loss_type in ("cispo", "vespo"),
            tracks_sampling=self.off_policy_mask_threshold is not None,
        )

    def _micro_batches(self) -> float:
        """By what TRL divides the loss of a micro-batch."""
        return float(self.current_gradient_accumulation_steps) if self.model.training else 1.0

    def _clip_penalty(self, log_ratio: Tensor, turn_ids: Tensor) -> Tensor:
        """λ · mean_i[gate_i · KL_i] (docs/paper_to_code.md), scaled for gradient accumulation as TRL's loss is."""
        gate = penalty_gate(log_ratio, turn_ids, self.args, (self.epsilon_low, self.epsilon_high))
        penalty = gated_kl(gate, log_ratio, turn_ids >= 0, self.args.kl_estimator).mean()
        self._log_mean("clip_penalty", penalty.detach())
        self._log_mean("clip_penalty_gate", gate.mean())
        return self.args.ctn_coef * penalty / self._micro_batches()

    def _add_clipping_bias(
        self, normalizer: ClippingBiasNormalizer, log_ratio: Tensor, turn_ids: Tensor, advantages: Tensor
    ) -> None:
        """One micro-batch's share of C(θ), see `ClippingBiasNormalizer`."""
        ratio = importance_ratio(log_ratio, turn_ids, self.args.importance_sampling_level, self.args.turn_ratio)
        loss_mask = turn_ids >= 0
        clip_range = (self.epsilon_low, self.epsilon_high, self.args.delta)
        clipped = is_clipped(ratio.detach(), advantages, *clip_range) & loss_mask
        bias = clipping_bias(ratio, advantages, loss_mask, *clip_range)
        normalizer.add(bias / self._micro_batches(), bool(clipped.any()))

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self._bias_normalizer is not None and self.accelerator.sync_gradients:
            self._metrics["train"]["clipping_bias_norm"].append(self._bias_normalizer.normalize(self.accelerator))
        return loss

    # ---------------------------------------------------------------------------------------------------------------
    # Metrics
    # ---------------------------------------------------------------------------------------------------------------

    def _gather_rows(self, values: Tensor, padding: int = 0) -> Tensor:
        """(B, N) of every rank, one below the other, with `padding` where a rank has fewer columns."""
        padded_rows = self.accelerator.pad_across_processes(values, dim=1, pad_index=padding)
        return self.accelerator.gather(padded_rows)

    def _show_advantages(self, advantages: Tensor, mask: Tensor) -> None:
        """Replace the advantages in TRL's completions table by the mean of each trajectory's, both (B, N)."""
        shown = self.accelerator.gather(masked_mean(advantages, mask, dim=1)).tolist()
        table = self._logs["advantages"]
        for _ in range(min(len(shown), len(table))):
            table.pop()
        table.extend(shown)

    def _log_mean(self, name: str, value: Tensor) -> None:
        mode = "train" if self.model.training else "eval"
        self._metrics[mode][name].append(self.accelerator.gather(value).nanmean().item())

    def _log_turn_metrics(
        self, log_ratio: Tensor, turn_ids: Tensor, advantages: Tensor, inputs: dict[str, Any]
    ) -> None:
        mode = "train" if self.model.training else "eval"
        clip_range = (1 - self.epsilon_low, 1 + self.epsilon_high)
        metrics = turn_metrics(log_ratio, turn_ids, advantages, clip_range, self.args.turn_ratio)
        for name, value in metrics.reduce(self.accelerator).items():
            self._metrics[mode][name].append(value)
        if mode == "train" and "generated_at_step" in inputs:
            age = self.state.global_step - int(inputs["generated_at_step"])
            self._metrics[mode]["off_policy_age"].append(age)
            self._follow_kl(self._metrics[mode]["kl_to_old"][-1], age)
            self._dump.add(self.state.global_step + 1, inputs, log_ratio, turn_ids, advantages)
            if self.accelerator.sync_gradients:
                self._dump.write()

    def _follow_kl(self, kl: float, age: int) -> None:
        """Before the backward pass, in which DeepSpeed steps the optimizer."""
        if self._kl_schedule is None:
            return
        if age > 0:  # before, policy and old policy are the same, and the KL is rounding
            self._kl_schedule.observe(kl)
        if self.accelerator.sync_gradients:
            self._metrics["train"]["lr_factor"].append(self._kl_schedule.adjust())


def loss_mask_of(batch: dict[str, Any]) -> Tensor:
    """(B, T) 1 on the tokens that TRL's loss keeps."""
    mask = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask
