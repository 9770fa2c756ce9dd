"""What generates, row by row: turns are submitted as contexts arrive, and polled until they have ended."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sorl_trl.rollout.generation import Generation, Generator

# What a rank without live rows generates from: id 0 is in every vocabulary, and the result is thrown away.
_DUMMY_CONTEXT = (0,)


@dataclass
class EngineWork:
    """What an engine has computed since it was opened."""

    prefilled_tokens: int = 0
    """Tokens of contexts that went through the model; padding does not count."""
    row_steps: int = 0
    """Decode steps, each counted once for every row that took part: also those of rows that had ended."""
    steps: int = 0
    """Decode steps."""


def draw_seed() -> int:
    """The seed of a rollout, from torch's global generator."""
    return int(torch.randint(2**62, ()))


class Engine(ABC):
    """Generates one turn per row, for many rows at a time; each row's turn may begin and end when it likes.

    A rollout opens the engine for its rows, submits the context of a row whenever a turn is due, and polls. Whatever
    happens, it closes the engine: then no request is left behind, and memory that only generation needs is given back.
    """

    window: int | None = None
    """Tokens that it can read, context and generation together, where there is an end to them. `open` may set it."""
    in_steps: bool = True
    """Whether `poll` is one step of all rows, so that polls count time. If not, `poll` waits for what comes next."""
    in_turns: bool = False
    """Whether each of these steps is a whole turn: then no reply is worth going on without."""
    polls_together: bool = False
    """Whether all ranks must poll equally often: they share parameters, or the engine itself."""

    def __init__(self) -> None:
        self.work = EngineWork()
        self.seed: int | None = None
        """Of the rollout; without one, `open` draws it."""

    def open(self, rows: int) -> None:
        """Begin a rollout of so many rows: nothing is kept of the one before.

        Engines that sample with a generator per row draw the seed of all from torch's global generator here, once: it
        is in checkpoints, and what a row samples depends on no other row.
        """
        self.work = EngineWork()

    def rollout_seed(self) -> int:
        """The one that the engine has been given, or a new one."""
        return draw_seed() if self.seed is None else self.seed

    @abstractmethod
    def submit(self, row: int, context_ids: Sequence[int], limit: int) -> None:
        """Have `row` generate 1 to `limit` tokens after `context_ids`, which are all that it has read and written.

        A row has one turn at a time, a context at least one token, and a limit at least 1.
        """

    @abstractmethod
    def poll(self) -> list[tuple[int, Generation]]:
        """Take a step, and return the turns that it has ended, by row. All ranks that share parameters poll together.

        With nothing submitted it returns nothing, having taken part in whatever the other ranks computed.
        """

    def release(self, row: int) -> None:
        """Forget a row: its trajectory has ended."""

    def wake(self) -> None:
        """Make the `poll` that waits, or the next one, return soon. Called from other threads, unless `in_steps`."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether no row is generating or waits for it."""

    def close(self) -> None:
        """End the rollout: give up what is still generating, and give memory back."""


class LockStepEngine(Engine):
    """Any `Generator` as an engine: a poll generates a whole turn for all rows that have been submitted.

    A poll makes exactly one call: with nothing submitted, of one token that is thrown away, if `polls_together`. Where
    parameters are sharded over ranks (FSDP, ZeRO-3 without gathering), or one engine serves all ranks at once, every
    rank must make as many calls as the others.
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
        # As a batch works that prefills whole contexts, and decodes all rows until the last has ended.
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
    """One turn each for `rows` of an open engine, by default the first ones, waiting for all of them."""
    rows = range(len(contexts)) if rows is None else rows
    for row, context, limit in zip(rows, contexts, limits, strict=True):
        engine.submit(row, context, limit)
    ended: dict[int, Generation] = {}
    while not engine.idle:
        ended.update(engine.poll())
    return [ended[row] for row in rows]


def check_generation(row: int, generation: Generation, limit: int) -> None:
    """Raise RuntimeError for a generation that breaks the contract."""
    size = len(generation.token_ids)
    if not 1 <= size <= limit:
        raise RuntimeError(f"generation {row} has {size} tokens: it must have 1 to {limit}")
    if generation.logprobs is not None and len(generation.logprobs) != size:
        raise RuntimeError(f"generation {row} has {len(generation.logprobs)} logprobs for {size} tokens")
