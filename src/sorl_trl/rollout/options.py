"""How a rollout generates, apart from what it says: nothing here changes the distribution that is sampled from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from sorl_trl.checks import COUNT, POSITIVE_COUNT, Checked, OneOf

EngineName = Literal["auto", "slots", "lockstep"]
ENGINES = OneOf(get_args(EngineName))


@dataclass(frozen=True)
class EngineOptions(Checked):
    """How turns are generated, and when the replies to them rejoin.

    Raises ValueError for a value out of range.
    """

    engine: Annotated[EngineName, ENGINES] = "auto"
    """Without vLLM: "slots" generates row by row and keeps what the model has read, "lockstep" calls `model.generate`
    for whole turns. "auto" takes slots for the models that they serve exactly, and says so where it cannot."""
    rejoin_after: Annotated[int, COUNT] = 4
    """Polls of the engine after which a reply rejoins, be it there sooner or waited for: see `Collector`. Without
    effect in lock-step and with a vLLM server. Ours: `benchmarks/rollout.py` measures it."""
    concurrency: Annotated[int, POSITIVE_COUNT] = 8
    """So many threads search at the same time. 1 for a search engine that must not be called by several. Ours: enough
    for what ends while a slow search is on its way."""
