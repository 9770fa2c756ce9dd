"""What this package reads of TRL's trainer, in one place: another version of TRL changes this file.

Functions of `trainers/` take a `Host`, or what they need of one; only users' functions get the trainer. Options are
read from its config. `Of` names what else is read: an attribute, by TRL's name for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Generic, TypeVar, cast

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import Trainer
from trl.extras.profiling import profiling_context

from sorl_trl.methods import Method
from sorl_trl.rollout.chat import RolloutSetup
from sorl_trl.rollout.policy_rollout import PolicyRollout
from sorl_trl.trainers.config import TurnLevelConfig

T = TypeVar("T")


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


class Of(Generic[T]):
    """An attribute of the trainer, read anew each time."""

    def __init__(self, path: str) -> None:
        self._read = attrgetter(path)

    def __get__(self, host: Host, _: type[Host]) -> T:
        return cast(T, self._read(host.trainer))


class Host:
    """A trainer, as the functions of this package see it."""

    args = Of[TurnLevelConfig]("args")
    accelerator = Of[Accelerator]("accelerator")
    # Ours
    method = Of[Method]("method")
    has_critic = Of[bool]("_has_critic")
    forward = Of[Any]("_forward")
    score = Of[Callable[..., Any]]("_score")
    ahead = Of[Any]("_ahead")
    # Models; `reference_model` is None if the reference is the policy without its adapter, or if there is none
    model = Of[Any]("model")
    reference_model = Of[Any]("ref_model")
    is_training = Of[bool]("model.training")
    logps_and_entropies = Of[Callable[..., Any]]("_get_per_token_logps_and_entropies")
    # Prompts and sampling
    train_dataset = Of[Any]("train_dataset")
    eval_dataset = Of[Any]("eval_dataset")
    processing_class = Of[Any]("processing_class")
    tokenizer = Of[Any]("_tokenizer")
    eos_token_ids = Of["list[int]"]("eos_token_ids")
    template_options = Of["dict[str, Any]"]("chat_template_kwargs")
    sampler = Of[Callable[[], Any]]("_get_train_sampler")
    rollout_func = Of[Any]("rollout_func")
    generate = Of[Callable[..., Any]]("_generate")
    generation_config = Of[Any]("generation_config")
    uses_vllm = Of[bool]("use_vllm")
    vllm = Of[Any]("vllm_generation")
    # Rewards: all processes' (N, F), from this process's rows, prompts, completions and ids; (F,) weights
    rewards_of = Of[Callable[..., Tensor]]("_calculate_rewards")
    reward_funcs = Of["list[Any]"]("reward_funcs")
    reward_names = Of["list[str]"]("reward_func_names")
    reward_weights = Of[Tensor]("reward_weights")
    # Progress, in optimizer steps
    step = Of[int]("state.global_step")
    last_step = Of[int]("state.max_steps")
    # TRL's table of completions, and `log_metric` of reward functions
    table = Of["dict[str, Any]"]("_logs")
    record = Of[Callable[[str, float], None]]("_log_metric")

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        """For users' functions alone."""

    @property
    def is_sharded(self) -> bool:
        """Whether an engine shards parameters, also while the policy samples."""
        return bool(self.trainer._dist.is_fsdp or self.trainer._dist.is_zero3)

    @property
    def has_engine(self) -> bool:
        """Whether DeepSpeed or FSDP trains the policy. They write and load checkpoints of their own."""
        return bool(self.trainer.is_deepspeed_enabled or self.trainer.is_fsdp_enabled)

    @property
    def checkpoints_activations(self) -> bool:
        """Whether FSDP recomputes activations."""
        return bool(self.trainer.is_fsdp_enabled and self.accelerator.state.fsdp_plugin.activation_checkpointing)

    @property
    def rollout(self) -> PolicyRollout | None:
        """The `rollout_func`, if it is one of ours."""
        return self.rollout_func if isinstance(self.rollout_func, PolicyRollout) else None

    @property
    def setup(self) -> RolloutSetup:
        """What that rollout needs to know."""
        setup: RolloutSetup = self.rollout_func.setup(self.trainer)
        return setup

    def prepared(self, inputs: Any) -> dict[str, Any]:
        """Inputs of a model, on its device."""
        return dict(Trainer._prepare_inputs(self.trainer, inputs))

    @property
    def is_loaded(self) -> bool:
        """Whether vLLM has the policy's weights."""
        return bool(self.step == self.trainer._last_loaded_step)

    def load_engine(self) -> None:
        """Send vLLM the policy's weights if it has earlier ones, as TRL does before a rollout."""
        if self.uses_vllm and not self.is_loaded:
            with profiling_context(self.trainer, "sync_weights"):
                self.vllm.sync_weights()
            self.trainer._last_loaded_step = self.step

    def unload_engine(self) -> None:
        """Have the next call of `load_engine` send the weights, whatever was sent before."""
        self.trainer._last_loaded_step = -1

    @property
    def group_size(self) -> int:
        """G, the number of trajectories per prompt."""
        return int(self.trainer.num_generations if self.is_training else self.trainer.num_generations_eval)

    @property
    def corrects_engine(self) -> bool:
        """Whether TRL weights the loss by the ratio of old policy to engine, and so scores every rollout."""
        return bool(self.uses_vllm and self.trainer.vllm_importance_sampling_correction)

    @property
    def ends(self) -> set[int]:
        """The ids that end a whole completion."""
        return {*self.eos_token_ids, self.tokenizer.pad_token_id}

    @property
    def cycle(self) -> tuple[int, Any]:
        """How many micro-batches have been trained on, and those of the last rollout."""
        return self.trainer._step, self.trainer._buffered_inputs

    @cycle.setter
    def cycle(self, cycle: tuple[int, Any]) -> None:
        self.trainer._step, self.trainer._buffered_inputs = cycle

    def save_checkpoint(self) -> None:
        """Write one now. All processes call it together."""
        trainer = self.trainer
        trainer._save_checkpoint(trainer.model_wrapped, None)
        trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)

    @property
    def metrics(self) -> dict[str, list[float]]:
        """TRL's lists of values to log, by name."""
        return cast("dict[str, list[float]]", self.trainer._metrics["train" if self.is_training else "eval"])

    def log_mean(self, name: str, values: Tensor, keep: Tensor | None = None) -> None:
        """Log the mean over all processes of `values`, where `keep` is True. All processes call it together."""
        keep = torch.ones_like(values, dtype=torch.bool) if keep is None else keep
        sums = torch.stack([torch.where(keep, values, 0.0).sum().float(), keep.sum().float()])
        total, count = self.accelerator.gather(sums.to(self.accelerator.device)).view(-1, 2).sum(0).tolist()
        self.metrics[name].append(total / count if count else float("nan"))

    def taken(self, kind: str) -> dict[str, list[Any]]:
        """The values that `log_metric` ("metrics") or `log_extra` ("extra_logs") has recorded, by name, only once."""
        pending = getattr(self.trainer, f"_pending_{kind}")
        found = dict(pending)
        pending.clear()
        return found

    def count_tokens(self, tokens: int) -> float:
        """The number of tokens in all rollouts of training, to which TRL's state adds these `tokens`."""
        state = self.trainer.state
        if self.is_training:
            state.num_input_tokens_seen += tokens
        return cast(float, state.num_input_tokens_seen)

    def loss_settings(self) -> LossSettings:
        """The settings of the next micro-batch."""
        trainer, args, is_training = self.trainer, self.args, self.is_training
        quantile, threshold = args.top_entropy_quantile, args.off_policy_mask_threshold
        masks_off_policy = partial(trainer.get_off_policy_mask, off_policy_threshold=threshold)
        micro_batches = int(args.steps_per_generation or 1) if is_training else 1
        return LossSettings(
            method=self.method,
            max_completion_length=int(args.max_completion_length or 0),
            is_training=is_training,
            step=self.step,
            ends_step=self.accelerator.sync_gradients or not is_training,
            micro_batches=float(trainer.current_gradient_accumulation_steps) if is_training else 1.0,
            share=1.0 / (self.accelerator.num_processes * micro_batches),
            reference_beta=args.beta,
            corrects_kl=bool(args.use_bias_correction_kl),
            weighs_engine=self.corrects_engine,
            off_policy_mask=masks_off_policy if threshold is not None else None,
            entropy_mask=partial(trainer.get_high_entropy_mask, threshold=1 - quantile) if quantile < 1.0 else None,
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
