"""Engines, which generate row by row: turns are submitted as contexts arrive, and polled until they end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sorl_trl.rollout.generation import Generation, Generator

# A rank without live rows generates from this: id 0 is in every vocabulary, and the result is discarded.
_DUMMY_CONTEXT = (0,)


@dataclass
class EngineWork:
    """How much an engine has computed since it was opened."""

    prefilled_tokens: int = 0
    """Context tokens that went through the model, without padding."""
    row_steps: int = 0
    """Decode steps times rows that took part, including rows that had ended."""
    steps: int = 0
    """Decode steps."""


def draw_seed() -> int:
    """Draw the seed of a rollout from torch's global generator."""
    return int(torch.randint(2**62, ()))


class Engine(ABC):
    """Generates one turn per row, for many rows at a time, whose turns may begin and end at any time.

    A rollout opens the engine for its rows, submits the context of a row whenever a turn is due, and polls. It always
    closes the engine, even after an error, so that no request is left behind and memory for generation is freed.
    """

    window: int | None = None
    """How many tokens the engine can read, context and generation together; None for no limit. `open` may set it."""
    in_steps: bool = True
    """Whether `poll` is one step of all rows, so that polls measure time. If not, `poll` waits for the next turns."""
    in_turns: bool = False
    """Whether each step is a whole turn, so that every step should wait for all replies."""
    polls_together: bool = False
    """Whether all ranks must poll equally often, because they share parameters or the engine itself."""

    def __init__(self) -> None:
        self.work = EngineWork()
        self.seed: int | None = None
        """The seed of the rollout. If it is None, `open` draws one."""

    def open(self, rows: int) -> None:
        """Begin a rollout of `rows` rows. Nothing of the previous rollout is kept.

        Engines with a random generator per row draw one seed for all from torch's global generator here. That
        generator is in checkpoints, and what a row samples depends on no other row.
        """
        self.work = EngineWork()

    def rollout_seed(self) -> int:
        """The seed that was set, or a new one."""
        return draw_seed() if self.seed is None else self.seed

    @abstractmethod
    def submit(self, row: int, context_ids: Sequence[int], limit: int) -> None:
        """Have `row` generate 1 to `limit` tokens after `context_ids`, everything that it has read and written so far.

        A row has one turn at a time, a context has at least one token, and `limit` is at least 1.
        """

    @abstractmethod
    def poll(self) -> list[tuple[int, Generation]]:
        """Take a step, and return the turns that it ended, by row. All ranks that share parameters poll together.

        With nothing submitted, it only takes part in what other ranks compute, and returns an empty list.
        """

    def release(self, row: int) -> None:
        """Forget a row whose trajectory has ended."""

    def wake(self) -> None:
        """Make a waiting `poll`, or the next one, return soon. Other threads call it, unless `in_steps`."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether no row is generating or waiting to."""

    def close(self) -> None:
        """End the rollout: abort unfinished turns, and free memory."""


class LockStepEngine(Engine):
    """Any `Generator` as an engine: each poll generates a whole turn for all submitted rows.

    A poll makes exactly one call. With `polls_together` and nothing submitted, that call generates one token, which is
    discarded: if parameters are sharded over ranks (FSDP, ZeRO-3 without gathering), or one engine serves all ranks at
    once, every rank must make the same number of calls.
    """

    in_turns = True

    def __init__(self, generator: Generator, polls_together: bool = False) -> None:
        super().__init__()
        self._generator = generator
        self.polls_together = polls_together
        self._submitted: dict[int, tuple[tuple[int, ...], int]] = {}
        self.window = getattr(generator, "window", None)

    def open(self, rows: int) -> None:
        super().open(rows)
        self._submitted = {}

    def submit(self, row: int, context_ids: Sequence[int], limit: int) -> None:
        self._submitted[row] = (tuple(context_ids), limit)

    def poll(self) -> list[tuple[int, Generation]]:
        submitted, self._submitted = self._submitted, {}
        rows = sorted(submitted)
        if not rows:
            if self.polls_together:
                self._generator.generate([_DUMMY_CONTEXT], [1])
            return []
        contexts, limits = zip(*(submitted[row] for row in rows), strict=True)
        generations = self._generator.generate(contexts, limits)
        # A batch prefills whole contexts, and decodes all rows until the last one has ended.
        steps = max(len(generation.token_ids) for generation in generations) - 1
        self.work.prefilled_tokens += sum(map(len, contexts))
        self.work.row_steps += steps * len(rows)
        self.work.steps += steps
        return list(zip(rows, generations, strict=True))

    @property
    def idle(self) -> bool:
        return not self._submitted


def generate_turns(
    engine: Engine, contexts: Sequence[Sequence[int]], limits: Sequence[int], rows: Sequence[int] | None = None
) -> list[Generation]:
    """Generate one turn each for `rows` of an open engine, by default the first rows, and wait for all of them."""
    rows = range(len(contexts)) if rows is None else rows
    for row, context, limit in zip(rows, contexts, limits, strict=True):
        engine.submit(row, context, limit)
    ended: dict[int, Generation] = {}
    while not engine.idle:
        ended.update(engine.poll())
    return [ended[row] for row in rows]


def check_generation(row: int, generation: Generation, limit: int) -> None:
    """Raise RuntimeError if a generation breaks the contract of `submit`."""
    size = len(generation.token_ids)
    if not 1 <= size <= limit:
        raise RuntimeError(f"generation {row} has {size} tokens: it must have 1 to {limit}")
    if generation.logprobs is not None and len(generation.logprobs) != size:
        raise RuntimeError(f"generation {row} has {len(generation.logprobs)} logprobs for {size} tokens")
