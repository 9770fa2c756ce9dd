"""The policy without its critic, for whoever must not see one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from trl.trainer.callbacks import SyncRefModelCallback

from sorl_trl.trainers.critic.model import CRITIC_ATTRIBUTE, causal_lm_of, is_critic_name


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


def send_policy_alone(engine: Any) -> None:
    """Keep the critic from TRL's wrapper of vLLM, whose model does not have its parameters.

    TRL builds the wrapper, which reads the parameters off the model within its own synchronization: the method that
    iterates over them is the only place to leave some out.
    """
    iterate = engine._iter_named_params
    engine._iter_named_params = lambda: ((name, p) for name, p in iterate() if not is_critic_name(name))


class FollowPolicy(SyncRefModelCallback):
    """`SyncRefModelCallback` pairs the parameters of two models one by one: the reference has no critic."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with detached_critic(self.accelerator.unwrap_model(kwargs["model"])):
            super().on_step_end(args, state, control, **kwargs)
