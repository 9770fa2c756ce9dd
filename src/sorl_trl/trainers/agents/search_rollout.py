"""The collector as TRL's `rollout_func`, for the trainers of this package and for plain `trl.GRPOTrainer` alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from trl import GRPOTrainer
from trl.data_utils import is_conversational
from trl.models import unwrap_model_for_generation

from sorl_trl.rollout import (
    Collector,
    Generator,
    HFGenerator,
    RetryPolicy,
    RolloutLimits,
    TagProtocol,
    TurnEnd,
    assemble,
    chat_message_frame,
    check_assembly,
    rollout_statistics,
)
from sorl_trl.search import SearchBackend
from sorl_trl.trainers.agents.vllm import VLLMGenerator, awake
from sorl_trl.trainers.checks.options import check_search_rollout
from sorl_trl.types import StopReason, Trajectory

# These ended on the policy's or the environment's own terms; the others hit a length limit.
_COMPLETE = {StopReason.ANSWERED, StopReason.MAX_TURNS, StopReason.SEARCH_UNAVAILABLE}


class SearchRollout:
    """A `rollout_func` whose policy may call a search engine between its generations.

    ```python
    trainer = SOGRPOTrainer(model, exact_match_reward, args, dataset, rollout_func=SearchRollout(search))
    ```

    Besides TRL's keys it returns, for each trajectory, `env_mask` (1 on the policy's tokens), `turn_ids` (the turn of
    each token, -1 on the environment's) and `trajectory` (a `sorl_trl.types.Trajectory`, for reward functions).
    Statistics of every rollout are logged as `rollout/…`.

    A complete trajectory ends in an end-of-sequence token: where the policy did not write it, it is appended as an
    environment token, so that TRL's truncation metrics and `mask_truncated_completions` mean length limits alone. A
    trajectory without a turn, whose prompt fills the window of engine or model, is that token and nothing else; the
    prompt that TRL gets is then cut to the longest that was read.

    Args:
        search: where queries go.
        protocol: how text becomes an action, and passages become text. For conversational prompts its default
            `message_frame` is replaced by the chat template's.
        limits: of one trajectory; `max_trajectory_tokens` must not exceed the trainer's `max_completion_length`,
            which is also its default.
        retry: how often and how long a search that is down is tried again.
    """

    def __init__(
        self,
        search: SearchBackend,
        protocol: TagProtocol | None = None,
        limits: RolloutLimits | None = None,
        retry: RetryPolicy | None = None,
    ) -> None:
        self.search = search
        self.protocol = protocol or TagProtocol()
        self.limits = limits
        self.retry = retry or RetryPolicy()

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        prompt_ids, images, _ = trainer._tokenize_prompts(prompts)
        if images is not None:
            raise ValueError("`SearchRollout` is for text: the prompts hold images, which the policy would not see.")
        # Trainers of this package have asked this before; `trl.GRPOTrainer` has not.
        check_search_rollout(trainer.args, trainer.tools)
        # Built anew each time: one rollout may serve several trainers, and it takes milliseconds.
        collector = self._build_collector(trainer, self._protocol_for(prompts, trainer))
        trajectories = collect(collector, prompt_ids, trainer, self.protocol.stop_strings)
        for name, value in rollout_statistics(trajectories).items():
            trainer._log_metric(f"rollout/{name}", value)
        return rollout_output(trajectories, trainer._tokenizer.eos_token_id)

    def _protocol_for(self, prompts: list[Any], trainer: GRPOTrainer) -> TagProtocol:
        """In a conversation, feedback after the policy has ended its message is a message of the chat template."""
        is_default = self.protocol.message_frame == TagProtocol().message_frame
        if is_default and is_conversational({"prompt": prompts[0]}):
            return replace(
                self.protocol, message_frame=chat_message_frame(trainer._tokenizer, trainer.chat_template_kwargs)
            )
        return self.protocol

    def _build_collector(self, trainer: GRPOTrainer, protocol: TagProtocol) -> Collector:
        limits = self.limits or RolloutLimits(max_trajectory_tokens=trainer.max_completion_length)
        if limits.max_trajectory_tokens > trainer.max_completion_length:
            raise ValueError(
                f"`limits.max_trajectory_tokens` is {limits.max_trajectory_tokens}, more than the trainer's "
                f"`max_completion_length` of {trainer.max_completion_length}. Lower the one or raise the other."
            )
        return Collector(trainer._tokenizer, self.search, protocol, limits, self.retry)


def collect(
    collector: Collector, prompt_ids: Sequence[Sequence[int]], trainer: GRPOTrainer, stop_strings: Sequence[str]
) -> list[Trajectory]:
    """Run `collector` with the policy of `trainer`, whatever engine and sharding it trains with."""
    failure: BaseException | None = None
    trajectories: list[Trajectory] = []
    with policy_generator(trainer, stop_strings) as (generator, any_active):
        try:
            trajectories = collector.collect(prompt_ids, generator, any_active)
        except BaseException as error:  # TRL's contexts restore nothing when an exception passes through them
            failure = error
    if failure is not None:
        raise failure
    return trajectories


def rollout_output(trajectories: Sequence[Trajectory], eos_token_id: int) -> dict[str, Any]:
    """`rollout_func`'s return value, one row per trajectory."""
    rows = assemble(trajectories)
    check_assembly(trajectories, rows)
    # A prompt that no turn follows was too long to be read: whole, it would make every row of the batch as long.
    longest = max((len(t.prompt_ids) for t in trajectories if t.segments), default=1)
    prompt_ids = [list(t.prompt_ids[:longest]) for t in trajectories]
    output: dict[str, Any] = {"prompt_ids": prompt_ids, "trajectory": [*trajectories]}
    for key in ("completion_ids", "env_mask", "turn_ids"):
        output[key] = [list(getattr(row, key)) for row in rows]
    has_logprobs = all(row.logprobs is not None for row in rows)
    output["logprobs"] = [list(row.logprobs or ()) for row in rows] if has_logprobs else None
    for i, trajectory in enumerate(trajectories):
        is_complete = trajectory.stop_reason in _COMPLETE
        if not trajectory.segments or (is_complete and output["completion_ids"][i][-1] != eos_token_id):
            output["completion_ids"][i].append(eos_token_id)
            output["env_mask"][i].append(0)
            output["turn_ids"][i].append(-1)
            if has_logprobs:
                output["logprobs"][i].append(0.0)
    return output


@contextmanager
def policy_generator(
    trainer: GRPOTrainer, stop_strings: Sequence[str]
) -> Iterator[tuple[Generator, Callable[[bool], bool]]]:
    """The generator that samples from the trainer's policy, and "is any rank still active?".

    Parameters that stay sharded while generating (FSDP, ZeRO-3 with `ds3_gather_for_generation=False`) and an engine
    that serves all ranks at once need every rank to make the same number of calls; elsewhere ranks are independent.
    """
    accelerator = trainer.accelerator
    if trainer.use_vllm:
        end = TurnEnd(trainer._tokenizer, stop_strings, trainer.eos_token_ids)
        with awake(trainer.vllm_generation):
            yield VLLMGenerator(trainer.vllm_generation, end), _any_rank(accelerator)
        return
    sharded = trainer._dist.is_fsdp or (trainer._dist.is_zero3 and not trainer.args.ds3_gather_for_generation)
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
        generator = HFGenerator(
            model,
            trainer._tokenizer,
            stop_strings,
            trainer.generation_config,
            trainer.eos_token_ids,
            synced_gpus=sharded,
        )
        yield generator, _any_rank(accelerator) if sharded else bool


def _any_rank(accelerator: Accelerator) -> Callable[[bool], bool]:
    def any_active(active: bool) -> bool:
        flag = torch.tensor(float(active), device=accelerator.device)
        return bool(accelerator.reduce(flag, reduction="sum") > 0)

    return any_active
