"""What the loss and a rollout read of TRL's trainer, in one place: another version of TRL changes this file.

max_completion_length, beta                                          TRL's options, as it holds them
top_entropy_quantile, get_high_entropy_mask,                         its masks of the loss
off_policy_mask_threshold, get_off_policy_mask
aux_loss_enabled, router_aux_loss_coef                               the router loss of a mixture
_entropy_bonus_enabled, entropy_coef, use_adaptive_entropy,          the entropy bonus, whose coefficient
_last_world_entropy, _entropy_window_stats                           may follow a target
current_gradient_accumulation_steps, state, accelerator              how an update is split
model, ref_model, _get_per_token_logps_and_entropies                 the models, and TRL's pass
_generate, rollout_func, vllm_generation, _last_loaded_step,         sampling, and calling reward functions
_calculate_rewards
num_generations, num_generations_eval,                               groups and rewards
reward_weights, reward_func_names
use_vllm, vllm_importance_sampling_…                                 TRL's correction of the engine
mask_truncated_completions, eos_token_ids, pad_to_multiple_of        the tensors of a batch
_metrics, _logs, _pending_metrics, _pending_extra_logs               what is logged
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch import Tensor
from trl.extras.profiling import profiling_context

from sorl_trl.methods import Method
from sorl_trl.trainers.config import TurnLevelConfig


@dataclass(frozen=True)
class LossSettings:
    """All that decides the loss of a micro-batch besides the batch and the model's pass over it."""

    method: Method
    max_completion_length: int
    is_training: bool
    step: int
    """The number of optimizer steps made."""
    ends_step: bool
    """Whether the optimizer steps after the micro-batch."""
    micro_batches: float
    """What the loss of a micro-batch is divided by."""
    share: float
    """The micro-batch's share of the generation batch, over all processes."""
    reference_beta: float
    """The coefficient of the reference KL."""
    corrects_kl: bool
    """Whether the importance ratio multiplies it."""
    weighs_engine: bool
    """Whether the batch's `importance_sampling_ratio` multiplies the loss."""
    off_policy_mask: Callable[..., Tensor] | None
    """TRL's, if `off_policy_mask_threshold` is set."""
    entropy_mask: Callable[[Tensor, Tensor], Tensor] | None
    """TRL's mask of (B, T) entropies and a mask, if `top_entropy_quantile` is below 1."""
    entropy_bonus: Callable[[Tensor, Tensor], Tensor] | None
    """The bonus of (B, T) entropies on a mask, if there is one."""
    router_coef: float | None
    """The coefficient of a mixture's router loss, if it has one."""


class Host:
    """A trainer of TRL, as the loss and a rollout see it."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        """For what reads images and the dataset's columns as TRL does, and for users' `rollout_func`."""

    @property
    def args(self) -> TurnLevelConfig:
        return cast(TurnLevelConfig, self.trainer.args)

    @property
    def accelerator(self) -> Accelerator:
        return cast(Accelerator, self.trainer.accelerator)

    @property
    def method(self) -> Method:
        return cast(Method, self.trainer.method)

    @property
    def model(self) -> Any:
        """The policy, wrapped or not."""
        return self.trainer.model

    @property
    def reference_model(self) -> Any:
        """None if the reference is the policy without its adapter, or if there is none."""
        return self.trainer.ref_model

    @property
    def has_critic(self) -> bool:
        return bool(self.trainer._has_critic)

    @property
    def tokenizer(self) -> Any:
        return self.trainer._tokenizer

    @property
    def is_training(self) -> bool:
        return bool(self.trainer.model.training)

    @property
    def step(self) -> int:
        """The number of optimizer steps made."""
        return int(self.trainer.state.global_step)

    @property
    def forward(self) -> Any:
        """The `Forward` of the trainer's models."""
        return self.trainer._forward

    def score(self, model: Any, batch: Mapping[str, Any], **options: Any) -> Any:
        """The `Pass` of a model over a batch, without gradients. All processes call it together."""
        return self.trainer._score(model, batch, **options)

    def logps_and_entropies(self, model: Any, ids: Tensor, mask: Tensor, length: int, **options: Any) -> Any:
        """TRL's pass: log-probabilities, entropies and router loss of the last `length` tokens of (B, L) `ids`."""
        return self.trainer._get_per_token_logps_and_entropies(model, ids, mask, length, **options)

    @property
    def checkpoints_activations(self) -> bool:
        """Whether FSDP recomputes activations."""
        trainer = self.trainer
        return bool(trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.activation_checkpointing)

    @property
    def ahead(self) -> Any:
        """The `RolloutsAhead` that sample during a run, or None: rollouts are then made when they are needed."""
        ahead = self.trainer._ahead
        return ahead if self.is_training and ahead is not None and ahead.is_running else None

    # ---------------------------------------------------------------------------------------------------------------
    # A rollout
    # ---------------------------------------------------------------------------------------------------------------

    def generate(self, prompts: list[Any]) -> Any:
        """What TRL returns of its engine."""
        return self.trainer._generate(prompts)

    def load_engine(self) -> None:
        """Send vLLM the policy's weights if it has earlier ones, as TRL does before a rollout."""
        trainer = self.trainer
        if trainer.use_vllm and self.step != trainer._last_loaded_step:
            with profiling_context(trainer, "sync_weights"):
                trainer.vllm_generation.sync_weights()
            trainer._last_loaded_step = self.step

    def count_tokens(self, tokens: int) -> float:
        """The number of tokens in all rollouts of training, to which TRL's state adds these `tokens`."""
        state = self.trainer.state
        if self.is_training:
            state.num_input_tokens_seen += tokens
        return cast(float, state.num_input_tokens_seen)

    def rewards_of(self, rows: list[Any], prompts: list[Any], completions: list[Any], ids: list[Any]) -> Tensor:
        """All processes' (N, F) rewards, from this process's rows, prompts, completions and completion ids."""
        return cast(Tensor, self.trainer._calculate_rewards(rows, prompts, completions, ids))

    @property
    def group_size(self) -> int:
        """G, the number of trajectories per prompt."""
        return int(self.trainer.num_generations if self.is_training else self.trainer.num_generations_eval)

    @property
    def reward_names(self) -> list[str]:
        return list(self.trainer.reward_func_names)

    @property
    def reward_weights(self) -> Tensor:
        """(F,)"""
        return cast(Tensor, self.trainer.reward_weights)

    @property
    def reference_beta(self) -> float:
        """The coefficient of the reference KL in the loss."""
        return float(self.trainer.beta)

    @property
    def corrects_engine(self) -> bool:
        """Whether TRL weights the loss by the ratio of old policy to engine, and so scores every rollout."""
        return bool(self.trainer.use_vllm and self.trainer.vllm_importance_sampling_correction)

    @property
    def weighs_engine(self) -> bool:
        """Whether the loss is weighted by the ratio of the old policy to the sampler: vLLM, or an earlier policy."""
        args = self.args
        is_proximal = args.async_staleness > 0 and args.async_old_policy == "proximal" and self.is_training
        return is_proximal or self.corrects_engine

    @property
    def engine_ratio_mode(self) -> tuple[str, float | None, float | None]:
        """TRL's mode of that correction, and the bounds of the ratio."""
        trainer = self.trainer
        bounds = trainer.vllm_importance_sampling_clip_min, trainer.vllm_importance_sampling_clip_max
        return (trainer.vllm_importance_sampling_mode, *bounds)

    @property
    def ends(self) -> set[int]:
        """The ids that end a whole completion."""
        return {*self.trainer.eos_token_ids, self.tokenizer.pad_token_id}

    @property
    def masks_truncated(self) -> bool:
        return bool(self.trainer.mask_truncated_completions)

    @property
    def pad_to_multiple_of(self) -> int | None:
        return cast("int | None", self.trainer.pad_to_multiple_of)

    # ---------------------------------------------------------------------------------------------------------------
    # What is logged
    # ---------------------------------------------------------------------------------------------------------------

    @property
    def metrics(self) -> dict[str, list[float]]:
        """TRL's lists of values to log, by name."""
        return cast("dict[str, list[float]]", self.trainer._metrics["train" if self.is_training else "eval"])

    @property
    def table(self) -> dict[str, Any]:
        """TRL's table of completions."""
        return cast("dict[str, Any]", self.trainer._logs)

    @property
    def logs_images(self) -> bool:
        return bool(self.trainer.log_multimodal)

    def taken_metrics(self) -> dict[str, list[float]]:
        """The values that `log_metric` has recorded, by name, and none from then on."""
        return self._taken(self.trainer._pending_metrics)

    def taken_columns(self) -> dict[str, list[Any]]:
        """The columns that `log_extra` has recorded, by name, and none from then on."""
        return self._taken(self.trainer._pending_extra_logs)

    @staticmethod
    def _taken(pending: Any) -> dict[str, list[Any]]:
        found = dict(pending)
        pending.clear()
        return found

    # ---------------------------------------------------------------------------------------------------------------
    # The loss
    # ---------------------------------------------------------------------------------------------------------------

    def loss_settings(self) -> LossSettings:
        """The settings of the next micro-batch."""
        trainer, args, is_training = self.trainer, self.trainer.args, self.is_training
        quantile, threshold = trainer.top_entropy_quantile, trainer.off_policy_mask_threshold

        def off_policy_mask(**given: Any) -> Tensor:
            masked: Tensor = trainer.get_off_policy_mask(**given, off_policy_threshold=threshold)
            return masked

        def entropy_mask(entropies: Tensor, mask: Tensor) -> Tensor:
            masked: Tensor = trainer.get_high_entropy_mask(entropies, mask, 1 - quantile)
            return masked

        micro_batches = int(args.steps_per_generation or 1) if is_training else 1
        return LossSettings(
            method=self.method,
            max_completion_length=trainer.max_completion_length,
            is_training=is_training,
            step=self.step,
            ends_step=trainer.accelerator.sync_gradients or not is_training,
            micro_batches=float(trainer.current_gradient_accumulation_steps) if is_training else 1.0,
            share=1.0 / (trainer.accelerator.num_processes * micro_batches),
            reference_beta=self.reference_beta,
            corrects_kl=bool(args.use_bias_correction_kl),
            weighs_engine=self.weighs_engine,
            off_policy_mask=None if threshold is None else off_policy_mask,
            entropy_mask=entropy_mask if quantile < 1.0 else None,
            entropy_bonus=self._entropy_bonus if trainer._entropy_bonus_enabled else None,
            router_coef=trainer.router_aux_loss_coef if trainer.aux_loss_enabled else None,
        )

    def _entropy_bonus(self, entropies: Tensor, mask: Tensor) -> Tensor:
        """The entropy bonus of a micro-batch: the coefficient times the mean of (B, T) entropies, in nats, on `mask`.

        As in TRL, the coefficient is fixed or follows a target, based on values from the end of the previous step.
        """
        trainer = self.trainer
        sums = torch.stack([(entropies * mask).sum(), mask.sum()])
        coef = trainer.entropy_coef
        if trainer.use_adaptive_entropy and trainer._last_world_entropy > trainer.args.entropy_target:
            coef = 0.0
        if self.is_training:
            if trainer.use_adaptive_entropy:
                self._follow_entropy(sums.detach())
            if trainer.accelerator.sync_gradients:
                self.metrics["entropy_coef"].append(trainer.entropy_coef)
        return coef * sums[0] / sums[1].clamp(min=1)

    def _follow_entropy(self, sums: Tensor) -> None:
        """Add a micro-batch's entropy and tokens, and adjust the coefficient when the optimizer steps."""
        trainer, args = self.trainer, self.trainer.args
        before = trainer._entropy_window_stats
        trainer._entropy_window_stats = sums if before is None else before + sums
        if not trainer.accelerator.sync_gradients:
            return
        total, count = trainer.accelerator.reduce(trainer._entropy_window_stats, reduction="sum")
        entropy = (total / count.clamp(min=1)).item()
        step = args.entropy_coef_delta if entropy <= args.entropy_target else -args.entropy_coef_delta
        trainer.entropy_coef = min(max(trainer.entropy_coef + step, args.entropy_coef_min), args.entropy_coef_max)
        trainer._last_world_entropy = entropy
        trainer._entropy_window_stats = None
