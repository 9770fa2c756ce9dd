"""The engine for a model of transformers: slots where they serve it, lock-step where they do not."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from transformers import GenerationConfig

from sorl_trl.checks import check_choice
from sorl_trl.rollout.engine import Engine, LockStepEngine
from sorl_trl.rollout.generation import HFGenerator, TurnEnd
from sorl_trl.rollout.options import ENGINES
from sorl_trl.rollout.slots.engine import SlotEngine
from sorl_trl.rollout.slots.support import NotServed

logger = logging.getLogger(__name__)

_SHARDED = "its parameters stay sharded over the ranks, which then compute each step together"


def model_engine(
    model: Any,
    end: TurnEnd,
    generation_config: GenerationConfig,
    engine: str = "auto",
    kv_cache_gib: float | None = None,
    synced_gpus: bool = False,
) -> Engine:
    """The engine that is asked for. Where slots do not serve the model, `auto` is lock-step, and says why once.

    Args:
        model: of transformers, with or without adapters; its mode and its parameters are the caller's.
        end: where a turn ends.
        generation_config: how to sample; what it leaves at None comes from `model.generation_config`.
        engine: "auto", "slots" or "lockstep".
        kv_cache_gib: what keys and values of slots may take.
        synced_gpus: whether parameters stay sharded, so that all ranks must make the same calls.

    Raises:
        NotServed: `engine` is "slots", and they do not serve the model. A ValueError.
        ValueError: `engine` is something else, or `generation_config` returns other than one row per context.
    """
    check_choice("engine", engine, ENGINES)
    if engine != "lockstep":
        try:
            if synced_gpus:
                raise NotServed(_SHARDED)
            cache_bytes = None if kv_cache_gib is None else max(int(kv_cache_gib * 2**30), 1)
            return SlotEngine(model, end, generation_config, cache_bytes)
        except NotServed as reason:
            if engine == "slots":
                raise NotServed(f"engine='slots' cannot serve this model: {reason}") from reason
            _say_fallback(str(reason))
    generator = HFGenerator(
        model, end.tokenizer, end.stop_strings, generation_config, end.eos_token_ids, synced_gpus=synced_gpus
    )
    return LockStepEngine(generator, polls_together=synced_gpus)


@cache
def _say_fallback(reason: str) -> None:
    """Say it once in a process for each reason."""
    logger.warning(
        "Rollouts generate in lock-step, and prefill each turn's whole context, so that "
        "`rejoin_after` and `kv_cache_gib` have no effect: %s.",
        reason,
    )
