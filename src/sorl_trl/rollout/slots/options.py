"""What a caller may choose about slots."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from sorl_trl.checks import POSITIVE_COUNT, SWITCH, Checked
from sorl_trl.rollout.options import EngineOptions


@dataclass(frozen=True)
class SlotOptions(Checked):
    """What slots may take, and what they report. Raises ValueError for a value out of range."""

    cache_bytes: Annotated[int | None, POSITIVE_COUNT] = None
    """The most that keys and values may take. By default a part of the memory that is free when a rollout begins."""
    prefill_tokens: Annotated[int, POSITIVE_COUNT] = 2048
    """Tokens of contexts, padding included, that go through the model at once. Ours: bounds what attention takes."""
    logprobs: Annotated[bool, SWITCH] = False
    """Report log-probabilities of the distribution that sampled. Off, for a trainer recomputes those that it needs."""

    @classmethod
    def of(cls, options: EngineOptions) -> SlotOptions:
        """What the arguments of a script say about slots."""
        gib = options.kv_cache_gib
        return cls(cache_bytes=None if gib is None else max(int(gib * 2**30), 1))
