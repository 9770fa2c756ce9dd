"""How a rollout generates, apart from what it says: nothing here changes the distribution that is sampled from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated

from sorl_trl.checks import COUNT, POSITIVE_COUNT, Checked, Number, OneOf, Problem

POSITIVE = Number(above=0)
ENGINES = ("auto", "slots", "lockstep")


@dataclass(frozen=True)
class EngineOptions(Checked):
    """How turns are generated, and when the replies to them rejoin.

    `rollout_engine` and `kv_cache_gib` are for transformers models; vLLM has an engine of its own. In lock-step every
    turn waits for all replies, as with a `rejoin_after` of 0.

    Raises ValueError for a value that is not allowed, and for one that has no effect in lock-step.
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
    search_concurrency: Annotated[int | None, POSITIVE_COUNT] = field(
        default=None,
        metadata={
            "help": "Threads that search at the same time. By default 8 for a search engine that says `thread_safe = "
            "True`, as those of this package do, and 1 for any other."
        },
    )
    kv_cache_gib: Annotated[float | None, POSITIVE] = field(
        default=None,
        metadata={
            "help": "GiB that keys and values of 'slots' may take; with less, fewer trajectories generate at once. By "
            "default three fifths of what is free on a GPU, on a CPU half of the memory that is available."
        },
    )

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.rollout_engine != "lockstep":
            return
        for name, without in (("rejoin_after", (0,)), ("kv_cache_gib", ())):
            value, default = getattr(self, name), getattr(type(self), name)
            if value not in (default, *without):
                what = f"`{name}` is {value!r}, but has no effect with `rollout_engine='lockstep'`. Remove it."
                yield Problem(name, what, default)
