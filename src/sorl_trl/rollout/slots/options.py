"""What a caller may choose about the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from sorl_trl.checks import POSITIVE_COUNT, Checked, OneOf

EngineChoice = Literal["auto", "slots", "lockstep"]
ENGINE_CHOICE = OneOf(get_args(EngineChoice))


@dataclass(frozen=True)
class EngineOptions(Checked):
    """How a model in this process generates. Raises ValueError for a value out of range."""

    engine: Annotated[EngineChoice, ENGINE_CHOICE] = "auto"
    """`slots`, or an error where they cannot serve the model; `lockstep`; or slots where they can (`auto`)."""
    cache_bytes: Annotated[int, POSITIVE_COUNT] | None = None
    """The most that keys and values may take. By default a part of the memory that is free when a rollout begins."""
    prefill_tokens: Annotated[int, POSITIVE_COUNT] = 2048
    """Tokens of contexts, padding included, that go through the model at once. Ours: bounds what attention takes."""
    logprobs: bool = False
    """Report log-probabilities of the distribution that sampled. Off, for a trainer recomputes those that it needs."""
