"""The policy without its critic, for whoever must not see one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from trl.trainer.callbacks import SyncRefModelCallback

from sorl_trl.trainers.critic.adapter import AdapterCritic, remove_critic_adapter
from sorl_trl.trainers.critic.model import CRITIC_ATTRIBUTE, Critic, causal_lm_of, is_critic_name


@contextmanager
def detached_critic(model: nn.Module) -> Iterator[None]:
    """The policy as if it never had a critic: for loading it, and for pairing it with another model."""
    causal_lm = causal_lm_of(model)
    critic = causal_lm._modules.pop(CRITIC_ATTRIBUTE, None)
    try:
        yield
    finally:
        if critic is not None:
            causal_lm.add_module(CRITIC_ATTRIBUTE, critic)


def detach_for_good(model: Any, critic: Critic) -> None:
    """Take `critic` out of `model`, its adapter too."""
    del causal_lm_of(model)._modules[CRITIC_ATTRIBUTE]
    if isinstance(critic, AdapterCritic):
        remove_critic_adapter(model, critic.config)


def send_policy_alone(engine: Any) -> None:
    """Keep the critic from TRL's wrapper of vLLM, whose model does not have its parameters.

    The wrapper reads the parameters off the model by itself, within its own synchronization, and is built by TRL: the
    method that iterates over them is the only place to leave some out.
    """
    engine._iter_named_params = _without_critic(engine._iter_named_params)


def _without_critic(iterate: Callable[[], Iterator[tuple[str, Any]]]) -> Callable[[], Iterator[tuple[str, Any]]]:
    def policy_params() -> Iterator[tuple[str, Any]]:
        return ((name, parameter) for name, parameter in iterate() if not is_critic_name(name))

    return policy_params


class FollowPolicy(SyncRefModelCallback):
    """`SyncRefModelCallback` pairs the parameters of two models one by one: the reference has no critic."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with detached_critic(self.accelerator.unwrap_model(kwargs["model"])):
            super().on_step_end(args, state, control, **kwargs)
