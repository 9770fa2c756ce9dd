"""What vLLM is asked for each turn, and what is made of its answer: alike in its own process and over HTTP."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sorl_trl.rollout import Generation, TurnEnd
from sorl_trl.rollout.engine import Engine

_COMPLETE = ("stop", "length")


@dataclass(frozen=True)
class TurnRequest:
    """One turn of one row."""

    row: int
    turn: int
    """How many turns the row has begun before in this rollout."""
    context_ids: tuple[int, ...]
    limit: int
    """Tokens to generate at most: what was asked for, cut where the window ends."""
    seed: int


@dataclass(frozen=True)
class Sampled:
    """What vLLM has sampled for a request."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None
    cached_tokens: int
    """Tokens of the context that it had read before; 0 where it does not say."""
    versions: tuple[int, int] | None = None
    """Of the weights when it was asked and when it answered, where they change meanwhile."""


class VLLMEngine(Engine):
    """What the engines around TRL's `VLLMGeneration` share.

    A turn ends where `HFGenerator` would end it: vLLM is told to stop at the same end-of-sequence tokens and no other,
    and to show special tokens in the text in which it looks for stop strings. Each turn is seeded from the rollout's
    base seed, its row and its number, so that what a row samples depends on no other row.
    """

    window: int

    def __init__(self, end: TurnEnd, window: int) -> None:
        super().__init__()
        self.window = window
        self._end = end
        self._base_seed = 0
        self._turns: Counter[int] = Counter()
        self._generating: dict[int, TurnRequest] = {}

    def open(self, rows: int) -> None:
        super().open(rows)
        self._base_seed = self.rollout_seed()
        self._turns = Counter()
        self._generating = {}

    @property
    def idle(self) -> bool:
        return not self._generating

    def _begin(self, row: int, context_ids: Sequence[int], limit: int) -> TurnRequest:
        """The request of a row's next turn."""
        turn = self._turns[row]
        self._turns[row] += 1
        seed = turn_seed(self._base_seed, row, turn)
        request = TurnRequest(row, turn, tuple(context_ids), min(limit, self.window - len(context_ids)), seed)
        self._generating[row] = request
        return request

    def _finish(self, request: TurnRequest, sampled: Sampled) -> tuple[int, Generation] | None:
        """The turn of a request, unless its row has been released. Raises RuntimeError if vLLM has given it up."""
        if self._generating.get(request.row) is not request:
            return None
        if sampled.finish_reason not in _COMPLETE:
            raise RuntimeError(
                f"vLLM ended turn {request.turn} of row {request.row} after {len(sampled.token_ids)} tokens with "
                f"finish_reason={sampled.finish_reason!r}, which must be one of {_COMPLETE}"
            )
        del self._generating[request.row]
        self.work.prefilled_tokens += len(request.context_ids) - sampled.cached_tokens
        self.work.row_steps += len(sampled.token_ids) - 1
        (stopped,) = self._end.reached([sampled.token_ids])
        return request.row, Generation(sampled.token_ids, sampled.logprobs, stopped, sampled.versions)


def turn_seed(base: int, row: int, turn: int) -> int:
    """A seed that neither torch's generators nor the server's JSON find too large; vLLM takes -1 for none."""
    digest = hashlib.blake2b(f"{base} {row} {turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def sampling_settings(vllm_generation: Any, end: TurnEnd) -> dict[str, Any]:
    """What every turn is sampled with: the trainer's settings, as TRL reads them, and `turn_settings`."""
    vllm = vllm_generation
    settings: dict[str, Any] = {
        "repetition_penalty": vllm.repetition_penalty,
        "temperature": vllm.temperature,
        "top_p": vllm.top_p,
        "top_k": vllm.top_k,
        "min_p": 0.0 if vllm.min_p is None else vllm.min_p,
        **(vllm.generation_kwargs or {}),
    }
    if vllm.structured_outputs_regex is not None:
        settings["structured_outputs"] = {"regex": vllm.structured_outputs_regex}
    return settings | turn_settings(end)


def turn_settings(end: TurnEnd) -> dict[str, Any]:
    """Where a turn ends, and what comes back, named as both `SamplingParams` and the server name it."""
    return {
        "n": 1,
        "logprobs": 0,  # that of the sampled token alone
        "stop": list(end.stop_strings),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "stop_token_ids": list(end.eos_token_ids),
        "ignore_eos": True,  # what vLLM itself takes for an end of sequence: the line above says what is
    }
