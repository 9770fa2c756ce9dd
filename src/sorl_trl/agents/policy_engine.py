"""The engine that samples from a trainer's policy, whatever the trainer's setup."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation

from sorl_trl.agents.vllm import vllm_engine
from sorl_trl.rollout import Engine, EngineOptions, TurnEnd, model_engine


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
        how = (options.rollout_engine, options.kv_cache_gib, sharded)
        engine = model_engine(model, end, trainer.generation_config, *how)
        try:
            yield engine, _active_on(engine, accelerator)
        except BaseException as error:  # it would keep TRL's contexts from restoring anything
            failure = error
    if failure is not None:
        raise failure


def _active_on(engine: Engine, accelerator: Accelerator) -> Callable[[bool], bool]:
    """A function that says whether any rank is active, if ranks depend on each other; else whether this one is."""
    if not engine.polls_together:
        return bool

    def any_active(active: bool) -> bool:
        flag = torch.tensor(float(active), device=accelerator.device)
        return bool(accelerator.reduce(flag, reduction="sum") > 0)

    return any_active
