"""What a trainer says before training of settings that have no effect, or an effect that nobody wants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from accelerate.logging import get_logger
from transformers import TrainerCallback

from sorl_trl.trainers.agents.agent_rollout import AgentRollout
from sorl_trl.trainers.checks.inert import inert_warning
from sorl_trl.trainers.checks.options import idle_options
from sorl_trl.trainers.checks.training_noise import noise_in, noise_in_arguments, noise_warning

if TYPE_CHECKING:
    from sorl_trl.trainers.base_config import TurnLevelConfig

logger = get_logger(__name__)


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise ValueError for options that an `AgentRollout` cannot honour, before a model is loaded.

    Args:
        given: the arguments of the trainer, by name.
    """
    rollout = given.get("rollout_func")
    if isinstance(rollout, AgentRollout):
        rollout.check(given["args"], given.get("tools"), given.get("environment_factory"))


def warn_of_idle_options(args: Any, has_tools: bool) -> None:
    """Log a warning for each option that does nothing in this setting."""
    for problem in idle_options(args, has_tools):
        logger.warning(problem.what)


class StartWarnings(TrainerCallback):
    """Warns once, on the main process, when training starts: a trainer that only evaluates needs no warning."""

    _has_warned = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        noise = [*noise_in(kwargs["model"]), *noise_in_arguments(args)]
        if noise:
            logger.warning(noise_warning(noise, args.disable_dropout))
        inert = inert_warning(args)
        if inert is not None:
            logger.warning(inert)


@contextmanager
def level_said(args: TurnLevelConfig) -> Iterator[None]:
    """Within it, `importance_sampling_level` is what it stands for: TRL warns of loss types that do not go with it."""
    given = args.importance_sampling_level
    args.importance_sampling_level = args.ratio_level
    try:
        yield
    finally:
        args.importance_sampling_level = given
