"""The critic in the policy's optimizer: learning rates and gradient clipping of its own, and a warm-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from sorl_trl.trainers.critic.model import Critic, is_critic_name


def add_critic_groups(
    optimizer: torch.optim.Optimizer, model: nn.Module, critic: Critic, head_rate: float, rate: float
) -> None:
    """Move the critic's parameters into groups of their own: its head, without weight decay, and the rest if any.

    Parameters that are in no group are added too: a user's own optimizer was made before there was a critic.
    """
    if any(group.get("critic") for group in optimizer.param_groups):
        return
    head = {id(p) for p in critic.head.parameters()}
    named = [(name, p) for name, p in model.named_parameters() if is_critic_name(name)]
    # A decay that suits the rate of other parameters would pull the head's values to 0.
    _move(optimizer, [(name, p) for name, p in named if id(p) in head], {"lr": head_rate, "weight_decay": 0.0})
    _move(optimizer, [(name, p) for name, p in named if id(p) not in head], {"lr": rate})


def _move(optimizer: torch.optim.Optimizer, named: list[tuple[str, nn.Parameter]], own: dict[str, Any]) -> None:
    """Move parameters out of the optimizer's groups into new ones, which differ from theirs in `own`."""
    own = {**own, "critic": True}
    missing = {id(p): (name, p) for name, p in named}
    for group in list(optimizer.param_groups):
        moved = [p for p in group["params"] if id(p) in missing]
        group["params"] = [p for p in group["params"] if id(p) not in missing]
        if moved:
            optimizer.add_param_group({**group, **own, "params": moved})
        for parameter in moved:
            del missing[id(parameter)]
    if missing:
        has_names = "param_names" in optimizer.param_groups[0]
        optimizer.add_param_group({**own, "params": [(name, p) if has_names else p for name, p in missing.values()]})


def clip_apart(accelerator: Accelerator, model: nn.Module, max_norm: float) -> tuple[Tensor, Tensor]:
    """Clip the gradients of policy and critic, each to a norm of at most `max_norm`, and return both norms before it.

    So the policy's step does not depend on the scale of the returns. Gradients are whole, or the shards of FSDP2.
    """
    accelerator.unscale_gradients()
    named = [*model.named_parameters()]
    policy, critic = ([p for name, p in named if is_critic_name(name) == of_critic] for of_critic in (False, True))
    norms = [torch.nn.utils.clip_grad_norm_(parameters, max_norm) for parameters in (policy, critic)]
    of_policy, of_critic = (norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms)
    return of_policy, of_critic


def hold_policy_back(scheduler: Any, steps: int) -> None:
    """Keep the learning rates of all groups but the critic's at 0 for the first `steps` steps.

    Raises:
        ValueError: The scheduler does not compute its rates from the step alone.
    """
    if not isinstance(scheduler, LambdaLR):
        raise ValueError(
            f"`critic_warmup_steps` is {steps}, but the {type(scheduler).__name__} of `lr_scheduler_type` cannot keep "
            "the policy's learning rate at 0 meanwhile. Use a type such as 'constant', 'linear' or 'cosine'."
        )
    for i, group in enumerate(scheduler.optimizer.param_groups):
        if not group.get("critic"):
            scheduler.lr_lambdas[i] = _after(steps, scheduler.lr_lambdas[i])
            group["lr"] = scheduler.base_lrs[i] * scheduler.lr_lambdas[i](0)
    scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]


def _after(steps: int, schedule: Callable[[int], float]) -> Callable[[int], float]:
    return lambda step: 0.0 if step < steps else schedule(step)


def check_deepspeed(config: dict[str, Any]) -> None:
    """Raise ValueError if DeepSpeed would build the optimizer or scheduler, which have one learning rate for all."""
    for name in ("optimizer", "scheduler"):
        if name in config:
            raise ValueError(
                f"The DeepSpeed configuration has {name!r}: {config[name]}, with one learning rate for the policy and "
                "the critic. Remove it there; `optim`, `learning_rate`, `critic_learning_rate` and "
                "`lr_scheduler_type` of `SOPPOConfig` take its place."
            )
