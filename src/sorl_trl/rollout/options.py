"""How a rollout generates, apart from what it says: nothing here changes the distribution that is sampled from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from sorl_trl.checks import COUNT, POSITIVE_COUNT, Checked, OneOf

ENGINES = ("auto", "slots", "lockstep")


@dataclass(frozen=True)
class EngineOptions(Checked):
    """How turns are generated, and when the replies to them rejoin.

    `rollout_engine` is for transformers models; vLLM has an engine of its own. `rejoin_after` has no effect in
    lock-step and with a vLLM server: see `Collector`.

    Raises ValueError for a value that is not allowed.
    """

    rollout_engine: Annotated[str, OneOf(ENGINES)] = field(
        default="auto",
        metadata={
            "help": "Without vLLM: 'slots' generates row by row and computes each token once, 'lockstep' calls "
            "`model.generate` for whole turns. 'auto' takes slots for models that they serve exactly, and says why "
            "where it cannot."
        },
    )
    rejoin_after: Annotated[int, COUNT] = field(
        default=32,
        metadata={
            "help": "Steps of the engine after which a row goes on with the reply to its turn, be it there sooner or "
            "waited for: about as many as a slow search takes. Ours: `benchmarks/rollout.py` measures it."
        },
    )
    search_concurrency: Annotated[int, POSITIVE_COUNT] = field(
        default=8,
        metadata={"help": "Threads that search at the same time; 1 for an engine that several must not call."},
    )
