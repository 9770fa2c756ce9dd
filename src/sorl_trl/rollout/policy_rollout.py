"""What all rollouts of a policy share: TRL's call, the sampling engine, and the token lists returned to TRL."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation

from sorl_trl.rollout import Engine, EngineOptions, TurnEnd, assemble, model_engine
from sorl_trl.rollout.chat import RolloutSetup
from sorl_trl.rollout.engines.vllm import vllm_engine
from sorl_trl.rollout.trajectories import laid_out_routes
from sorl_trl.types import StopReason, Trajectory

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

# The policy, the environment, the agent or an infrastructure failure ended these; the others reached a length limit.
_COMPLETE = {
    StopReason.ANSWERED,
    StopReason.MAX_TURNS,
    StopReason.ENVIRONMENT_DONE,
    StopReason.AGENT_ERROR,
    StopReason.SEARCH_UNAVAILABLE,
    StopReason.ENVIRONMENT_UNAVAILABLE,
    StopReason.NO_CALL,
}


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
        self.check(trainer.args, trainer.tools)  # ours have called it already, TRL's never do
        with policy_engine(trainer, self.stop_strings, self.engine) as (engine, any_active):
            if asks_for_routes(trainer.args):  # in evaluation, too, as which a dry run rehearses
                engine.report_routes()
            return self.sample(prompts, trainer, engine, any_active)

    def sample(
        self, prompts: list[Any], trainer: GRPOTrainer, engine: Engine, any_active: Callable[[bool], bool] = bool
    ) -> dict[str, Any]:
        """The return value and metrics of a call, but sampled with the caller's engine."""
        examples = getattr(trainer, "rollout_examples", None) or [{"prompt": prompt} for prompt in prompts]
        output, metrics = self.collect(self.setup(trainer), prompts, examples, engine, any_active)
        for name, value in metrics.items():
            trainer._log_metric(name, value)
        return output

    @abstractmethod
    def collect(
        self,
        setup: RolloutSetup,
        prompts: Sequence[Any],
        examples: Sequence[Mapping[str, Any]],
        engine: Engine,
        any_active: Callable[[bool], bool] = bool,
    ) -> tuple[dict[str, Any], dict[str, float]]:
        """Collect a trajectory for each prompt. Returns what TRL expects of a `rollout_func`, and metrics by name.

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


def rollout_output(
    trajectories: Sequence[Trajectory],
    eos_token_id: int,
    window: int | None = None,
    contexts: bool = False,
    routes: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """The return value of a `rollout_func`: one row per trajectory, no context with more tokens than the `window`.

    A complete trajectory ends in an end-of-sequence token, so TRL does not count it as cut, unless it is full.
    `contexts` adds the context of each token, and `routes` the engine's experts (`laid_out_routes`). If turns have
    agents, the agent of each trained turn is included.
    """
    rows = assemble(trajectories)
    # A prompt without a turn was too long to be read. Kept whole, it would lengthen every row of the batch.
    longest = max((len(t.prompt_ids) for t in trajectories if t.segments), default=1)
    prompt_ids = [list(t.prompt_ids[:longest]) for t in trajectories]
    output: dict[str, Any] = {"prompt_ids": prompt_ids, "trajectory": [*trajectories]}
    for key in ("completion_ids", "env_mask", "turn_ids", *(["context_ids"] if contexts else [])):
        output[key] = [list(getattr(row, key)) for row in rows]
    if any(turn.agent for each in trajectories for turn in each.turns):
        trained = [() if each.stop_reason.is_infrastructure_failure else each.turns for each in trajectories]
        output["agents"] = [[turn.agent for turn in turns] for turns in trained]
    has_logprobs = all(row.logprobs is not None for row in rows)
    output["logprobs"] = [list(row.logprobs or ()) for row in rows] if has_logprobs else None
    for i, (trajectory, row) in enumerate(zip(trajectories, rows, strict=True)):
        last = abs(row.context_ids[-1]) if row.context_ids else 0
        read = sum(abs(context) == last for context in row.context_ids) + (0 if last else len(prompt_ids[i]))
        is_complete = trajectory.stop_reason in _COMPLETE and not (window is not None and read >= window)
        if not trajectory.segments or (is_complete and output["completion_ids"][i][-1] != eos_token_id):
            output["completion_ids"][i].append(eos_token_id)
            output["env_mask"][i].append(0)
            output["turn_ids"][i].append(-1)
            if contexts:
                output["context_ids"][i].append(last)
            if has_logprobs:
                output["logprobs"][i].append(0.0)
    if routes is not None:
        sizes = [len(prompt) + len(ids) for prompt, ids in zip(prompt_ids, output["completion_ids"], strict=True)]
        of_rows = zip(trajectories, sizes, strict=True)
        output["routes"] = [laid_out_routes(trajectory, size, routes) for trajectory, size in of_rows]
    return output


def asks_for_routes(args: Any) -> bool:
    """Whether a trainer's config requests the experts that the engine chooses. TRL's own never does."""
    return bool(getattr(args, "router_replay", "none") == "r3")


@contextmanager
def policy_engine(
    trainer: GRPOTrainer, stop_strings: Sequence[str], options: EngineOptions
) -> Iterator[tuple[Engine, Callable[[bool], bool]]]:
    """The engine that samples from the trainer's policy, and a function that tells whether any rank is still active.

    If parameters stay sharded while generating (FSDP, ZeRO-3 with `ds3_gather_for_generation=False`), or vLLM is
    spread over ranks, every rank must poll equally often; otherwise ranks are independent. A trainer whose agents have
    separate weights combines several engines in its method `agent_engine`.
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
        how = (options.rollout_engine, options.kv_cache_gib, sharded)
        make = partial(model_engine, model, end, trainer.generation_config, *how)
        engine = trainer.agent_engine(make) if hasattr(trainer, "agent_engine") else make()
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
