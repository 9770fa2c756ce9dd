"""Engines, which generate row by row: turns are submitted as contexts arrive and polled until they end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Look back a little further, because a token may add no character (part of one, a dropped space).
_TAIL_MARGIN = 8


@dataclass(frozen=True)
class Generation:
    """The tokens that one row sampled in one call.

    `token_ids` has every sampled id, including the end-of-sequence token; its last token may extend beyond the stop
    string. `logprobs` are those of the sampling engine, one per token, if it reports them. `stopped` tells whether a
    stop string or an end-of-sequence token ended the row, even at its last allowed token; otherwise `max_new_tokens`
    did. `versions` are those of the weights when the turn was requested and when it was complete, if they can change.
    `routes` (n, L, k) are the experts that the engine chose, if it reports them (`Engine.report_routes`), for the n
    tokens that it has read: the whole row except the last token that the turn samples (`rollout/routing.py`).
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    stopped: bool
    versions: tuple[int, int] | None = None
    routes: np.ndarray[Any, Any] | None = field(default=None, compare=False, repr=False)


@dataclass(eq=False)
class TurnRequest:
    """A turn that a row wants: 1 to `limit` tokens after `token_ids`, which is everything read and written so far."""

    row: int
    token_ids: Sequence[int]
    limit: int
    stops: Sequence[str] = ()
    """Additional non-empty strings that end this turn."""
    schema: Mapping[str, Any] | None = None
    """A JSON schema that the text of the turn follows, only for engines with `constrains`."""
    run: int = 0
    """The trajectory, of which each context has a row of the engine."""


class TurnEnd:
    """Decides where a turn ends, for every engine: at an end-of-sequence token, or at a stop string in the text."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_strings: Sequence[str], eos_token_ids: Sequence[int]
    ) -> None:
        if not eos_token_ids:
            raise ValueError("eos_token_ids is empty: name at least one token that ends a message")
        self.stop_strings = tuple(stop_strings)
        self.eos_token_ids = tuple(eos_token_ids)
        self.tokenizer = tokenizer
        self.tail = max(map(len, self.stop_strings), default=0) + _TAIL_MARGIN
        """How many of the last tokens to check: a stop string before them would have ended the turn earlier."""

    def tail_with(self, stops: Sequence[str]) -> int:
        """The `tail` of a row with additional stop strings."""
        return max(self.tail, max(map(len, stops)) + _TAIL_MARGIN) if stops else self.tail

    def reached(self, sampled: Sequence[Sequence[int]], stops: Sequence[Sequence[str]] | None = None) -> list[bool]:
        """Whether each row's last token ended its turn.

        `sampled` has all tokens that each row has sampled, or at least the last `tail_with(stops)`. `stops` has
        additional stop strings for each row.
        """
        stops = [()] * len(sampled) if stops is None else stops
        texts: list[str] = self.tokenizer.batch_decode(
            [list(ids[-self.tail_with(own) :]) for ids, own in zip(sampled, stops, strict=True)],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        return [
            ids[-1] in self.eos_token_ids or any(stop in text for stop in (*self.stop_strings, *own))
            for ids, text, own in zip(sampled, texts, stops, strict=True)
        ]


class Engine(ABC):
    """Generates one turn per row, for many rows at a time. Turns may begin and end at any time.

    A rollout opens the engine for its rows, submits the context of a row whenever a turn is due, and polls. It always
    closes the engine, even after an error, to abort open requests and free memory for generation.
    """

    window: int | None = None
    """The most tokens that context and generation may have together; None for no limit. `open` may set it."""
    in_steps: bool = True
    """Whether `poll` is one step of all rows, so that polls measure time. If not, `poll` waits for turns to end."""
    in_turns: bool = False
    """Whether each step is a whole turn, so that every step should wait for all replies."""
    polls_together: bool = False
    """Whether all ranks must poll equally often, because they share parameters or the engine itself."""
    constrains: bool = False
    """Whether a turn can be made to follow a JSON schema."""
    seed: int | None = None
    """The seed of the rollout. If it is None, `open` draws one."""

    def report_routes(self) -> None:
        """From the next rollout on, have generations include `routes`. Raises ValueError if the engine cannot."""
        raise ValueError(
            f"`router_replay` is 'r3', but {type(self).__name__} does not report which experts it chose: use "
            "`rollout_engine='slots'` (in `EngineOptions`) or `use_vllm=True`."
        )

    @abstractmethod
    def open(self, rows: int) -> None:
        """Begin a rollout of `rows` trajectories. Nothing is kept from the previous rollout.

        Rows 0 to `rows` - 1 are their first contexts. A trajectory may have further contexts, each in its own row: row
        = trajectory + `rows` × context. Rows need not be declared: `submit` takes any number from 0 on.

        Engines with a random generator per row draw one seed for all from torch's global generator here. That
        generator is saved in checkpoints. A row's samples depend neither on other rows nor on when it is first
        submitted.
        """

    def rollout_seed(self) -> int:
        """The seed that was set, or a new one from torch's global generator."""
        return int(torch.randint(2**62, ())) if self.seed is None else self.seed

    @abstractmethod
    def submit(self, request: TurnRequest) -> None:
        """Begin a turn. A row has one at a time, a context has at least one token, and `limit` is at least 1."""

    @abstractmethod
    def poll(self) -> list[tuple[int, Generation]]:
        """Take a step and return the turns that it ended, by row. All ranks that share parameters poll together.

        With nothing submitted, it only takes part in what other ranks compute, and returns an empty list.
        """

    def release(self, row: int) -> None:
        """Drop a row with the turn that it generates or waits to generate; `poll` no longer returns it.

        The row may be submitted again and does not repeat its random numbers.
        """

    def wake(self) -> None:
        """Make a waiting `poll`, or the next one, return soon. Called from other threads, unless `in_steps`."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether no row is generating or waiting to."""

    def close(self) -> None:
        """End the rollout: abort unfinished turns, and free memory."""


def generate_turns(
    engine: Engine, contexts: Sequence[Sequence[int]], limits: Sequence[int], rows: Sequence[int] | None = None
) -> list[Generation]:
    """Generate one turn each for `rows` of an open engine, by default the first rows, and wait for all of them."""
    rows = range(len(contexts)) if rows is None else rows
    for row, context, limit in zip(rows, contexts, limits, strict=True):
        engine.submit(TurnRequest(row, context, limit))
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


def positions_of(model: PreTrainedModel) -> int | None:
    """The number of positions of a model; None if its config gives no positive number, that is, no limit."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return positions if positions and positions > 0 else None
