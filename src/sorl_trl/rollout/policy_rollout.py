"""What all rollouts of a policy share: the sampling engine, what they collect, and the token lists for TRL."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation

from sorl_trl.rollout import Engine, EngineOptions, TurnEnd, model_engine
from sorl_trl.rollout.chat import RolloutSetup
from sorl_trl.rollout.engines.base import positions_of
from sorl_trl.rollout.engines.vllm import vllm_engine
from sorl_trl.rollout.progress import RolloutBar
from sorl_trl.rollout.routing import asks_for_routes, output_routes
from sorl_trl.rollout.trajectories import closed
from sorl_trl.types import Trajectory

MESSAGES = "trajectory_messages"
"""The key of trajectories as messages, which this package's trainers pass on as `completions`."""
PROMPTS = "prompt_messages"
"""The key of prompts with what `reset` added, which they pass on as `prompts`."""
TWO_LOOPS = (
    "`tools` or `environment_factory` is given with a `rollout_func`, which makes whole trajectories itself: pass "
    "them to a `ToolBox`, or leave `rollout_func` out."
)
ADDED_COLUMNS = ("trajectory", "agents", "agent_rewards", "environments")
"""What rollouts pass to reward functions beside the columns of the dataset, which must not have these names."""


class PolicyRollout(ABC):
    """A `rollout_func` that makes whole trajectories with a trainer's policy. Subclasses implement `collect`.

    Raises TypeError if `engine` is not an `EngineOptions`.
    """

    stop_strings: Sequence[str] = ()
    """The strings that end a turn, besides the end of a message."""
    answers: bool = False
    """Whether trajectories may end with an answer in tags, to be compared with golden answers."""
    needs_prompts: bool = True
    """Whether each row of the dataset must have a `prompt`, which an object of a `ToolBox` may write instead."""

    def __init__(self, engine: EngineOptions | None = None) -> None:
        if engine is not None and not isinstance(engine, EngineOptions):
            raise TypeError(f"engine is {engine!r}, but must be an `EngineOptions`")
        self.engine = engine or EngineOptions()

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        """What TRL expects of a `rollout_func`, sampled with the trainer's policy."""
        self.check(trainer.args, trainer.tools)
        examples = getattr(trainer, "rollout_examples", None) or [{"prompt": prompt} for prompt in prompts]
        window = positions_of(trainer.accelerator.unwrap_model(trainer.model))
        trajectories = self.roll_out(prompts, trainer, examples)
        return rollout_output(closed(trajectories, trainer._tokenizer.eos_token_id, window))

    def roll_out(
        self, prompts: Sequence[Any], trainer: GRPOTrainer, examples: Sequence[Mapping[str, Any]]
    ) -> list[Trajectory]:
        """Collect a trajectory for each prompt with the trainer's policy, and log metrics."""
        engine, bar = policy_engine(trainer, self.stop_strings, self.engine), RolloutBar(trainer.args)
        with engine as (sampler, any_active), closing(bar):
            if asks_for_routes(trainer.args):  # in evaluation, too, as which a dry run rehearses
                sampler.report_routes()
            setup = replace(self.setup(trainer), progress=bar.begin(len(prompts)))
            found, metrics = self.collect(setup, prompts, examples, sampler, any_active)
        for name, value in metrics.items():
            trainer._log_metric(name, value)
        return found

    @abstractmethod
    def collect(
        self,
        setup: RolloutSetup,
        prompts: Sequence[Any],
        examples: Sequence[Mapping[str, Any]],
        engine: Engine,
        any_active: Callable[[bool], bool] = bool,
    ) -> tuple[list[Trajectory], dict[str, float]]:
        """Collect a trajectory for each prompt. Returns them, with what reward functions get, and metrics by name.

        Args:
            setup: The result of the method `setup`.
            prompts: Either all texts or all lists of messages.
            examples: The row of the dataset for each prompt.
            engine: Samples from the policy.
            any_active: As for `Collector.collect`.
        """

    @abstractmethod
    def setup(self, trainer: GRPOTrainer) -> RolloutSetup:
        """What the rollout needs from a trainer."""

    def check_tokenizer(self, trainer: GRPOTrainer) -> None:
        """Raise ValueError if the rollout cannot use the trainer's tokenizer and chat template."""
        self.setup(trainer)

    @property
    def shows_tools(self) -> bool:
        """Whether prompts show tools in the chat template, and turns are messages that call them."""
        return False

    def measures(self, row: int) -> Mapping[str, float | None]:
        """The measures of a row's environment or agent in the last rollout, by name."""
        return {}

    def fork(self) -> PolicyRollout:
        """A copy for a rollout that may run concurrently with others."""
        return copy.copy(self)

    def check(self, config: Any, tools: Any = None) -> None:
        """Raise ValueError for trainer arguments that the rollout does not support."""
        if tools:
            raise ValueError(TWO_LOOPS)
        if config.use_transformers_continuous_batching:
            raise ValueError(
                "`use_transformers_continuous_batching` is True, but ignores stop strings, so turns would not end "
                "after an action. Set it to False, and use `use_vllm=True` for speed."
            )
        if config.max_completion_length is None:
            raise ValueError("`max_completion_length` is None, but must limit trajectories: set it.")


def rollout_output(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Trajectories as a `rollout_func` returns them. `context_ids` and routes are left out if none has any."""
    output: dict[str, Any] = {"prompt_ids": [[*each.prompt_ids] for each in trajectories]}
    for key in ("completion_ids", "env_mask", "turn_ids", "logprobs"):
        output[key] = [getattr(each, key) for each in trajectories]
    if any(row is None for row in output["logprobs"]):  # TRL takes them for the whole batch, or not at all
        output["logprobs"] = None
    if any(any(each.context_ids) for each in trajectories):
        output["context_ids"] = [each.context_ids for each in trajectories]
    output |= output_routes(trajectories)
    return output | {name: [each.columns[name] for each in trajectories] for name in trajectories[0].columns}


def with_columns(trajectories: Sequence[Trajectory], **columns: Sequence[Any] | None) -> list[Trajectory]:
    """Trajectories with further columns, each a value per trajectory, or None for no such column."""
    given = {name: values for name, values in columns.items() if values}
    added = [{name: values[i] for name, values in given.items()} for i in range(len(trajectories))]
    return [replace(each, columns={**each.columns, **own}) for each, own in zip(trajectories, added, strict=True)]


@contextmanager
def policy_engine(
    trainer: GRPOTrainer, stop_strings: Sequence[str], options: EngineOptions
) -> Iterator[tuple[Engine, Callable[[bool], bool]]]:
    """The engine that samples from the trainer's policy, and a function that tells whether any rank is still active.

    If parameters stay sharded while generating (FSDP, ZeRO-3 with `ds3_gather_for_generation=False`), or vLLM is
    spread over ranks, every rank must poll equally often; otherwise ranks are independent.
    """
    accelerator = trainer.accelerator
    end = TurnEnd(trainer._tokenizer, stop_strings, trainer.eos_token_ids)
    if trainer.use_vllm:
        vllm = vllm_engine(trainer.vllm_generation, end)
        yield vllm, _active_on(vllm, accelerator)
        return
    sharded = trainer._dist.is_fsdp or (trainer._dist.is_zero3 and not trainer.args.ds3_gather_for_generation)
    failure: BaseException | None = None
    # The context is entered once per rollout: under ZeRO-3 it gathers the parameters, on all ranks together.
    with (
        unwrap_model_for_generation(
            trainer.model_wrapped,
            accelerator,
            gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
            generation_kwargs=trainer.generation_kwargs,
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
        ) as model,
        torch.no_grad(),
        trainer._dist.summon_full_params(trainer.model_wrapped, recurse=False),
    ):
        engine = model_engine(model, end, trainer.generation_config, options, sharded)
        try:
            yield engine, _active_on(engine, accelerator)
        except BaseException as error:  # it would keep TRL's contexts from restoring anything
            failure = error
    if failure is not None:
        raise failure


def _active_on(engine: Engine, accelerator: Accelerator) -> Callable[[bool], bool]:
    """A function that tells whether any rank is active, if ranks depend on each other; else whether this one is."""
    if not engine.polls_together:
        return bool

    def any_active(active: bool) -> bool:
        flag = torch.tensor(float(active), device=accelerator.device)
        return bool(accelerator.reduce(flag, reduction="sum") > 0)

    return any_active
