"""Modifies optimizer steps: normalizes and clips the gradient, and adapts the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LRScheduler, OneCycleLR
from transformers import TrainerCallback

from sorl_trl.methods import MicroBatch, Objective
from sorl_trl.ops import clipping_bias, kl_at_rest, kl_controlled_factor
from sorl_trl.trainers.critic import is_critic_name
from sorl_trl.trainers.host import Host, LossSettings
from sorl_trl.trainers.metrics import UpdateKL

KL_FACTOR, KL_NOISE = "policy_lr_factor", "policy_kl_at_rest"
"""The scheduler's attributes that hold the state of `KLControl`, and so are in every checkpoint."""
FIRST_FACTOR = 0.1
"""The factor with which a run begins, because its first updates have no KL to follow. Ours."""


# -------------------------------------------------------------------------------------------------------------------
# The gradient
# -------------------------------------------------------------------------------------------------------------------


class ClippingBiasNormalizer:
    """Accumulates C(θ), the gradient that clipping removed, and divides the step's gradient by max(1, ‖C(θ)‖₂).

    C(θ) averages the tokens of each trajectory, whatever the method's mean is. It is the
    mean over all micro-batches of the optimizer step and over all processes. The floor of 1 is our choice: if nothing
    is clipped, C is 0 and nothing is divided.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._gradients: list[Tensor] | None = None

    def observe(self, settings: LossSettings, batch: MicroBatch, objective: Objective) -> None:
        """Add one micro-batch's share of C(θ), with a second backward pass if something is clipped."""
        if objective.stopped is None or not (batch.is_training and batch.log_ratio.requires_grad):
            return
        stopped = objective.stopped & batch.loss_mask
        if stopped.any():
            weights = (
                batch.inputs["importance_sampling_ratio"]
                if settings.weighs_engine and not objective.is_weighted
                else 1.0
            )
            bias = clipping_bias(batch.ratio, batch.advantages * weights, stopped, batch.loss_mask)
            self.add(bias * batch.row_scale / settings.micro_batches)

    def add(self, bias: Tensor) -> None:
        """Add the gradient of a scalar, already divided by the number of micro-batches in the step."""
        # autograd.grad, unlike backward, neither touches .grad nor fires DDP's reduction hooks.
        found = torch.autograd.grad(
            bias, self._parameters, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        gradients = [gradient.float() for gradient in found]
        if self._gradients is None:
            self._gradients = gradients
        else:
            torch._foreach_add_(self._gradients, gradients)

    def normalize(self, accelerator: Accelerator) -> float:
        """Divide every `.grad` by max(1, ‖C(θ)‖₂), reset C(θ) and return the norm. All processes call it together."""
        is_clipped = torch.tensor(float(self._gradients is not None), device=accelerator.device)
        if accelerator.reduce(is_clipped, reduction="sum") == 0:
            return 0.0
        gradients = self._gradients or [torch.zeros_like(p, dtype=torch.float32) for p in self._parameters]
        flat = accelerator.reduce(torch.cat([g.reshape(-1) for g in gradients]), reduction="mean")
        norm = float(torch.linalg.vector_norm(flat))
        self._gradients = None
        if norm > 1.0:
            torch._foreach_mul_([p.grad for p in self._parameters if p.grad is not None], 1.0 / norm)
        return norm


def bias_normalizer(host: Host) -> ClippingBiasNormalizer | None:
    """The normalizer of a run whose method has `bias_norm`, or None.

    Raises ValueError if no second gradient can be computed, or TRL's options mask tokens out of the loss.
    """
    args = host.args
    if not host.method.bias_norm:
        return None
    is_reentrant = (args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
    if host.has_engine or is_reentrant:
        raise ValueError(
            "`bias_norm` is True, but DeepSpeed, FSDP and reentrant gradient checkpointing cannot compute a second "
            "gradient: use DDP, with `gradient_checkpointing_kwargs={'use_reentrant': False}`."
        )
    if args.top_entropy_quantile != 1.0 or args.off_policy_mask_threshold is not None:
        raise ValueError(
            "`bias_norm` is True, but would also count tokens that `top_entropy_quantile` or "
            "`off_policy_mask_threshold` masks: use only one of the two."
        )
    if args.max_grad_norm == 0:
        raise ValueError(
            "`bias_norm` is True, but `max_grad_norm` is 0, and the gradient is divided as it is clipped: raise it."
        )
    named = host.model.named_parameters()
    return ClippingBiasNormalizer(parameter for name, parameter in named if not is_critic_name(name))


def clip_apart(accelerator: Accelerator, parts: Iterable[Iterable[nn.Parameter]], max_norm: float) -> list[Tensor]:
    """Clip the gradient of each part to a norm of at most `max_norm`, and return the norms before clipping.

    Thus, no part's step depends on the scale of another's gradient. Gradients are whole, or FSDP2 shards.
    """
    accelerator.unscale_gradients()
    norms = [torch.nn.utils.clip_grad_norm_(part, max_norm) for part in parts]
    whole = (norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms)
    return [norm.to(accelerator.device) for norm in whole]  # that of a part without a gradient is a 0 on the CPU


def move_to_own_groups(optimizer: torch.optim.Optimizer, own: Mapping[str, nn.Parameter], **options: Any) -> None:
    """Put named parameters, possibly new to the optimizer, into their own groups with these options."""
    names, groups = {id(p): name for name, p in own.items()}, [{**group} for group in optimizer.param_groups]
    known = {id(p) for group in groups for p in group["params"]}
    groups.append({"params": [p for p in own.values() if id(p) not in known]})
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in names]
    for group in groups:
        moved = [p for p in group["params"] if id(p) in names]
        named = {"param_names": [names[id(p)] for p in moved]} if "param_names" in groups[0] else {}
        if moved:
            optimizer.add_param_group({**group, **options, **named, "params": moved})


# -------------------------------------------------------------------------------------------------------------------
# The learning rate
# -------------------------------------------------------------------------------------------------------------------


class KLControl(TrainerCallback):
    """Multiplies the policy's learning rate, but not the critic's, by a factor that follows the KL.

    It acts before the backward pass of an update's last micro-batch, in which DeepSpeed steps the optimizer. The
    factor starts at `FIRST_FACTOR`. It is part of the scheduler's state and base rates, so it survives a resume. If
    something else lowers the learning rates, the lowered rates are scheduled from then on.

    What an update measures before the policy has moved is no movement: a running mean of such KLs is subtracted.

    `target_kl` is a `length_adjusted_kl`; 0 leaves the schedule unchanged, even when a run that had lowered the rate
    is resumed. `record` is called with the factor of each update.

    Raises:
        ValueError: When training begins, if the learning rates of the schedule cannot be lowered.
    """

    def __init__(self, target_kl: float, record: Callable[[float], object]) -> None:
        self.target_kl, self._record = target_kl, record
        self._optimizer: Any = None
        self._scheduler: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._optimizer, self._scheduler = kwargs["optimizer"], kwargs["lr_scheduler"]
        factor = getattr(self._scheduler, KL_FACTOR, None)
        if self.target_kl:
            check_scheduler(self._scheduler)
            if factor is None:
                self._scale(1.0, FIRST_FACTOR)
        elif factor is not None:
            self._scale(factor, 1.0)

    def observe(self, batch: MicroBatch, kl: UpdateKL) -> None:
        """Set the learning rate if the optimizer steps after a micro-batch. `kl` is what `MetricLog` returns."""
        if batch.is_training and batch.ends_step and self.target_kl:
            self._record(self.adjust(kl))

    def adjust(self, kl: UpdateKL) -> float:
        """Set the policy's learning rate for an update that measures `kl`, and return the factor."""
        if self._scheduler is None:  # the loss is computed outside of training
            return 1.0
        noise = kl_at_rest(getattr(self._scheduler, KL_NOISE, math.nan), kl.at_rest)
        setattr(self._scheduler, KL_NOISE, noise)
        before: float = getattr(self._scheduler, KL_FACTOR)
        factor = before
        rates = [group["lr"] for group in self._optimizer.param_groups if not group.get("critic")]
        if any(rates) and kl.moved != 0:  # while the schedule's rate is 0, what seems to move is rounding or noise
            factor = kl_controlled_factor(before, kl.moved - (0.0 if math.isnan(noise) else noise), self.target_kl)
        if factor != before:
            self._scale(before, factor)
        return factor

    def _scale(self, before: float, factor: float) -> None:
        scale_policy_rate(self._optimizer, self._scheduler, factor / before)
        setattr(self._scheduler, KL_FACTOR, factor)


class PolicyRest(TrainerCallback):
    """Keeps the policy's learning rate, but not the critic's, at 0 for the first `steps` optimizer steps.

    Raises ValueError, when training begins, for a schedule that does not compute rates from the step alone.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        scheduler = given["lr_scheduler"]
        if not isinstance(scheduler, LambdaLR):
            raise ValueError(
                f"`critic_warmup_steps` is {self._steps}, but the {type(scheduler).__name__} of `lr_scheduler_type` "
                "cannot hold the policy's learning rate at 0 for that long. Use a type such as 'constant', 'linear' "
                "or 'cosine'."
            )
        for number, group in enumerate(scheduler.optimizer.param_groups):
            if not group.get("critic"):
                scheduler.lr_lambdas[number] = self._held(scheduler.lr_lambdas[number])
                if state.global_step < self._steps:
                    group["lr"] = scheduler._last_lr[number] = 0.0

    def _held(self, schedule: Callable[[int], float]) -> Callable[[int], float]:
        return lambda step: 0.0 if step < self._steps else schedule(step)


def check_optimizers(optimizer: Any, scheduler: Any, target_kl: float) -> None:
    """Raise ValueError if a user's scheduler has another optimizer, or rates that cannot be lowered."""
    if scheduler is not None and target_kl:
        check_scheduler(scheduler)
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise ValueError(
            f"`optimizers` has a {type(scheduler).__name__} of a {type(scheduler.optimizer).__name__}, but not that "
            "optimizer: pass both."
        )


def check_scheduler(scheduler: Any) -> None:
    """Raise ValueError unless the learning rates of `scheduler` can be lowered permanently."""
    lowerable = isinstance(scheduler, LRScheduler) and not isinstance(scheduler, OneCycleLR | CyclicLR)
    if not lowerable:
        raise ValueError(
            f"`lr_scheduler` is a {type(scheduler).__name__}, but its learning rates cannot be lowered permanently. "
            "Choose a scheduler of torch with `lr_scheduler_type`, such as 'linear', and none in the DeepSpeed "
            "configuration, or set `target_kl=0`."
        )


def scale_policy_rate(optimizer: Any, scheduler: Any, factor: float) -> None:
    """Multiply the learning rates of all parameter groups but the critic's by `factor`, for the rest of the run.

    Optimizer and scheduler keep the new rates in their state, so they survive a resume.
    """
    factors = [1.0 if group.get("critic") else factor for group in optimizer.param_groups]
    for group, each in zip(optimizer.param_groups, factors, strict=True):
        group["lr"] *= each
    for part in (scheduler, *getattr(scheduler, "_schedulers", [])):  # SequentialLR has several
        for name in ("base_lrs", "_last_lr"):  # ReduceLROnPlateau has no base: it starts from the groups' rates
            if hasattr(part, name):
                rates = zip(getattr(part, name), factors, strict=True)
                setattr(part, name, [rate * each for rate, each in rates])
