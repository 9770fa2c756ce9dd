"""Requests to vLLM and their results, shared by the colocated engine and the server."""

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
    """The request for one turn of one row."""

    row: int
    turn: int
    """How many turns the row has begun before it in this rollout."""
    context_ids: tuple[int, ...]
    limit: int
    """The most tokens to generate: the requested limit, cut where the window ends."""
    seed: int


@dataclass(frozen=True)
class Sampled:
    """The result of a request to vLLM."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None
    cached_tokens: int
    """How many tokens of the context were in the cache; 0 if vLLM does not say."""
    versions: tuple[int, int] | None = None
    """Versions of the weights when the turn was requested and when it was answered, if they can change meanwhile."""


class VLLMEngine(Engine):
    """Base of the engines around TRL's `VLLMGeneration`.

    A turn ends where `HFGenerator` would end it: vLLM stops at the same end-of-sequence tokens and no others, and
    keeps special tokens in the text in which it looks for stop strings. Each turn is seeded from the rollout's base
    seed, its row and its number, so that what a row samples depends on no other row.
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
        """Make the request of a row's next turn."""
        turn = self._turns[row]
        self._turns[row] += 1
        seed = turn_seed(self._base_seed, row, turn)
        request = TurnRequest(row, turn, tuple(context_ids), min(limit, self.window - len(context_ids)), seed)
        self._generating[row] = request
        return request

    def _finish(self, request: TurnRequest, sampled: Sampled) -> tuple[int, Generation] | None:
        """The turn of a request, unless its row has been released. Raises RuntimeError if vLLM has aborted it."""
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
    """A seed that torch's generators and the server's JSON can hold, and never -1, which vLLM reads as none."""
    digest = hashlib.blake2b(f"{base} {row} {turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def sampling_settings(vllm_generation: Any, end: TurnEnd) -> dict[str, Any]:
    """The sampling settings of every turn, under names that both `SamplingParams` and the server use.

    They combine the trainer's settings, as TRL reads them, with our ends of turns and output options.
    """
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
    return settings | {
        "n": 1,
        "logprobs": 0,  # only the sampled token's
        "stop": list(end.stop_strings),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "stop_token_ids": list(end.eos_token_ids),
        "ignore_eos": True,  # vLLM's own end-of-sequence tokens, in favour of the line above
    }
