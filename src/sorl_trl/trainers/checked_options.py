"""A trainer that says before training what of its settings has no effect, or an effect that nobody wants."""

from __future__ import annotations

import inspect
from typing import Any

from accelerate.logging import get_logger
from transformers import TrainerCallback
from trl import GRPOTrainer

from sorl_trl.trainers.agents.search_rollout import SearchRollout
from sorl_trl.trainers.checks.inert import inert_warning
from sorl_trl.trainers.checks.options import check_search_rollout, idle_options
from sorl_trl.trainers.checks.training_noise import disable_noise, noise_in, noise_in_arguments, noise_warning

logger = get_logger(__name__)

_SIGNATURE = inspect.signature(GRPOTrainer.__init__)


class CheckedOptions(GRPOTrainer):
    """`GRPOTrainer` that refuses options which `SearchRollout` cannot honour, and warns of those that do nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = _SIGNATURE.bind(self, *args, **kwargs).arguments
        rollout = getattr(given.get("rollout_func"), "__wrapped__", None)  # `checked_rollout` is around it
        if isinstance(rollout, SearchRollout):  # before a model is loaded
            check_search_rollout(given["args"], given.get("tools"), given.get("environment_factory"))
        super().__init__(*args, **kwargs)
        if self.args.disable_dropout:
            disable_noise(self.model)
        for problem in idle_options(self.args, has_tools=bool(self.tools)):
            logger.warning(problem.what)
        self.add_callback(_StartWarnings())


class _StartWarnings(TrainerCallback):
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
