"""The slot engine: rows are prefilled, decode together, and keep their keys and values between turns."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import psutil
import torch
from transformers import GenerationConfig

from sorl_trl.rollout.engines.base import Engine, Generation, TurnEnd, TurnRequest, positions_of
from sorl_trl.rollout.engines.lockstep import HFGenerator, LockStepEngine
from sorl_trl.rollout.engines.slots.cache import Forward
from sorl_trl.rollout.engines.slots.rows import Row, SlotTable, plan
from sorl_trl.rollout.engines.slots.support import (
    NotServed,
    base_model,
    bytes_per_token,
    check_generation_config,
    check_model,
)
from sorl_trl.rollout.options import EngineOptions
from sorl_trl.rollout.routing import Routers

logger = logging.getLogger(__name__)

_BELOW_ONE = 1 - 2**-32  # keeps rounding from putting a draw beyond the last token

CACHE_SHARE = {"cuda": 0.6, "cpu": 0.5}
"""The share of a device's free memory that the KV cache may take by default. Our choice."""


class SlotEngine(Engine):
    """Generates with a transformers model in this process; each row's KV cache survives between turns.

    A poll is one prefill of the new tokens of submitted contexts, and one decode step of all rows that generate. Rows
    of one poll with the same context share its prefill. A row keeps its slot between its turns. If memory is short,
    rows wait until others are released. If all rows with slots wait for replies, some give up their slots and are
    prefilled again later.

    Turns end and tokens are sampled as with `HFGenerator`, but each row has its own random numbers, which depend on
    the row and on one seed per rollout from torch's global generator. The caller sets eval mode and gathers sharded
    parameters. Dropout of a model in training mode acts as it does in `model.generate`.

    Args:
        model: A model of transformers, with or without adapters.
        end: Where a turn ends.
        generation_config: How to sample. Options at None come from `model.generation_config`.
        cache_bytes: The most memory that keys and values may take. By default, three fifths of what is free on a GPU
            as a rollout begins; on a CPU, half of what is available, shared with the other local ranks.
        prefill_tokens: How many context tokens, padding included, one forward reads (our choice, to bound
            attention's memory).

    Raises:
        NotServed: The engine would not compute what `model.generate` does. This is a ValueError with the reason.
    """

    def __init__(
        self,
        model: Any,
        end: TurnEnd,
        generation_config: GenerationConfig,
        cache_bytes: int | None = None,
        prefill_tokens: int = 2048,
    ) -> None:
        self.logprobs_at: float | None = None
        """The temperature of the log-probabilities (over all tokens) in generations; None for no log-probabilities."""
        self.prefilled_tokens = 0
        """Context tokens that went through the model in this rollout, without padding."""
        self._cache_bytes = cache_bytes
        self._prefill_tokens = prefill_tokens
        self._end = end
        self._base = base_model(model)
        check_model(self._base)
        self._sampler = Sampler(check_generation_config(generation_config, model), self._base)
        self._bytes_per_token = bytes_per_token(model, self._base)
        self._forward = Forward(model, self._base)
        self._routers: Routers | None = None
        self.window = self._positions = positions_of(self._base)
        self._row_seed: int | None = None
        self._rows: dict[int, Row] = {}
        self._waiting: list[Row] = []
        self._table = SlotTable(0)

    def report_routes(self) -> None:
        self._routers = Routers(self._base)

    def open(self, rows: int) -> None:
        self.prefilled_tokens = 0
        self._row_seed = self.rollout_seed() if self._sampler.is_random else None
        self._rows, self._waiting = {}, []
        budget = self._cache_bytes or _free_bytes(self._base.device)
        self._table = SlotTable(int(budget) // self._bytes_per_token)
        room = self._table.most_tokens + 1  # a turn ends without reading the last token that it samples
        self.window = room if self._positions is None else min(room, self._positions)

    def close(self) -> None:
        self._rows, self._waiting = {}, []
        self._table = SlotTable(0)

    def submit(self, request: TurnRequest) -> None:
        assert request.schema is None, "this engine cannot follow a schema"
        each = self._row(request.row)
        each.begin(request)
        self._waiting.append(each)

    def poll(self) -> list[tuple[int, Generation]]:
        ended: list[tuple[int, Generation]] = []
        with torch.no_grad():
            started = self._admit()
            if started:
                ended += self._prefill(started)
            if self._table.decoding:
                ended += self._decode()
        return sorted(ended, key=lambda each: each[0])

    def release(self, row: int) -> None:
        each = self._row(row)
        if each in self._waiting:
            self._waiting.remove(each)
        elif each in self._table.decoding:
            self._table.decoding.remove(each)
        self._table.give_up(each)
        each.busy = False

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._table.decoding

    def _row(self, index: int) -> Row:
        """The row of this number, created on first use."""
        if index not in self._rows:
            seed = self._row_seed
            # NumPy's generators, because torch's keep 32 bits of a seed: rows of different rollouts would coincide.
            random = None if seed is None else np.random.default_rng((seed, index))
            self._rows[index] = Row(index, random)
        return self._rows[index]

    def _admit(self) -> list[Row]:
        """Give slots to waiting rows while there is room, first to those that have one; to one row in any case."""
        if not self._waiting:
            return []
        table, started = self._table, list[Row]()
        for row in sorted(self._waiting, key=lambda row: row.slot is None):
            if not table.has_room(row):
                if started or table.decoding:
                    continue
                table.evict_for(row)  # because no row generates, and thus none will make room
            table.place(row)
            started.append(row)
        self._waiting = [row for row in self._waiting if row not in started]
        if self._waiting:
            _warn_once("Rows wait for KV cache memory, so fewer generate at once (see `kv_cache_gib`).")
        return started

    def _prefill(self, started: list[Row]) -> list[tuple[int, Generation]]:
        """Read the new tokens, sample each row's first token, and let the rows decode."""
        table = self._table
        for row in started:
            table.truncate(row, row.known())
        batches, twins = plan(started, self._prefill_tokens)
        table.make_room(max(len(row.context) for row in started))
        logits = torch.cat([self._read(batch) for batch in batches])
        table.copy(twins)
        table.decoding.extend(started)
        read = [row for batch in batches for row in batch]
        sources = [*range(len(read)), *(read.index(row) for row, _ in twins)]
        rows = [*read, *(twin for _, twin in twins)]
        return self._take(rows, logits[torch.tensor(sources, device=logits.device)])

    def _read(self, batch: Sequence[Row]) -> torch.Tensor:
        """Run the new tokens of rows through the model. A long row comes alone and in parts."""
        logits = None
        size = self._prefill_tokens if len(batch) == 1 else max(len(row.context) for row in batch)
        while new := [row.context[len(row.cached) : len(row.cached) + size] for row in batch]:
            if not new[0]:
                break
            logits = self._run(batch, new)
            self.prefilled_tokens += sum(map(len, new))
        assert logits is not None
        return logits

    def _decode(self) -> list[tuple[int, Generation]]:
        rows = sorted(self._table.decoding, key=lambda row: row.slot)
        self._table.make_room(max(len(row.cached) for row in rows) + 1)
        return self._take(rows, self._run(rows, [row.sampled[-1:] for row in rows]))

    def _run(self, rows: Sequence[Row], new: Sequence[Sequence[int]]) -> torch.Tensor:
        """Read and cache `new` tokens of rows. Returns the logits after them."""
        slots, lengths = [row.slot for row in rows], [len(row.cached) for row in rows]
        forward = partial(self._forward, self._table.cache, slots, new, lengths)
        routes: Any = [()] * len(rows)
        if self._routers is None:
            logits = forward()
        else:
            logits, routes = self._routers.recorded(forward, len(rows))
        for row, ids, own in zip(rows, new, routes, strict=True):
            row.cached.extend(ids)
            row.routes.extend(own[-len(ids) :])  # shorter rows are padded in front
        return logits

    def _take(self, rows: Sequence[Row], logits: torch.Tensor) -> list[tuple[int, Generation]]:
        """Sample one token per row, and park the rows that end their turn."""
        uniforms = [row.random.random() for row in rows if row.random is not None]
        tokens, logprobs = self._sampler.choose(logits, uniforms, self.logprobs_at)
        for i, row in enumerate(rows):
            row.sampled.append(tokens[i])
            if logprobs is not None:
                row.logprobs.append(logprobs[i])
        ended = []
        reached = self._end.reached([row.sampled for row in rows], [row.stops for row in rows])
        for row, stopped in zip(rows, reached, strict=True):
            if stopped or len(row.sampled) >= row.limit:
                self._table.decoding.remove(row)
                row.busy = False
                reported = None if self.logprobs_at is None else tuple(row.logprobs)
                routes = None if self._routers is None else np.stack(row.routes)
                ended.append((row.index, Generation(tuple(row.sampled), reported, stopped, routes=routes)))
        return ended


class Sampler:
    """Chooses tokens as a model's `generate` does: by temperature, top-k, top-p and min-p, or greedily.

    `is_random` tells whether it needs random numbers.
    """

    def __init__(self, config: GenerationConfig, model: Any) -> None:
        self.is_random = bool(config.do_sample)
        self._processors: Any = model._get_logits_processor(config)

    def choose(
        self, logits: torch.Tensor, uniforms: Sequence[float], logprobs_at: float | None = None
    ) -> tuple[list[int], list[float] | None]:
        """Choose a token per row of `logits` (B, V).

        With a temperature `logprobs_at`, also return the token's log-probability among all tokens at that temperature,
        regardless of top-k, top-p and min-p.

        `uniforms` has one number per row, or none for greedy decoding.
        """
        # None of the processors of options that slots serve reads the ids that it is given.
        scores: torch.Tensor = self._processors(None, logits.float())
        if self.is_random:
            chosen = _at(torch.tensor(uniforms, dtype=torch.float64), scores)
        else:
            chosen = scores.argmax(-1, keepdim=True)
        if logprobs_at is None:
            return chosen[:, 0].tolist(), None
        logprobs = torch.log_softmax(logits.float() / logprobs_at, -1).gather(-1, chosen)
        return chosen[:, 0].tolist(), logprobs[:, 0].tolist()


def _at(uniforms: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The tokens at these points of the cumulative distributions; never one with probability 0.

    Raises RuntimeError if the scores are NaN or infinite.
    """
    # Convert first: `cumsum(dtype=…)` takes three times as long.
    cumulative = torch.softmax(scores, -1).double().cumsum(-1)
    points = uniforms.to(scores.device)[:, None] * _BELOW_ONE * cumulative[:, -1:]
    if not points.isfinite().all():
        raise RuntimeError("the policy's logits are NaN or infinite, so sampling is impossible")
    return torch.searchsorted(cumulative, points, right=True)


def _free_bytes(device: torch.device) -> int:
    """Part of the memory that is currently free. A forward pass, and buffers while they grow, need the rest."""
    if device.type == "cuda":
        unclaimed, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((unclaimed + reserved) * CACHE_SHARE["cuda"])
    ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    return int(psutil.virtual_memory().available * CACHE_SHARE["cpu"]) // ranks


def model_engine(
    model: Any,
    end: TurnEnd,
    generation_config: GenerationConfig,
    options: EngineOptions | None = None,
    synced_gpus: bool = False,
) -> Engine:
    """Make the engine of `options.rollout_engine`. If 'auto' is 'lockstep', the reason is logged once.

    Args:
        model: A model of transformers, with or without adapters. The caller sets its mode and gathers its parameters.
        end: Where a turn ends.
        generation_config: How to sample. Options at None come from `model.generation_config`.
        options: Which engine, and how much memory the keys and values of slots may take.
        synced_gpus: Whether parameters stay sharded, so that all ranks must make the same calls.

    Raises:
        NotServed: The engine is 'slots', which does not support the model. This is a ValueError.
        ValueError: `generation_config` returns more than one row per context.
    """
    options = options or EngineOptions()
    engine = options.rollout_engine
    if engine != "lockstep":
        try:
            if synced_gpus:
                raise NotServed("its parameters stay sharded over ranks, which must compute each step together")
            if engine == "auto" and model.device.type != "cpu":
                raise NotServed("slots are slower on a GPU, where vLLM (`use_vllm`) is much faster than both")
            gib = options.kv_cache_gib
            return SlotEngine(model, end, generation_config, None if gib is None else max(int(gib * 2**30), 1))
        except NotServed as reason:
            if engine == "slots":
                raise NotServed(f"rollout_engine='slots' does not support this model: {reason}") from reason
            _warn_once(
                "Rollouts generate in lock-step and prefill each turn's whole context, so `rejoin_after` and "
                f"`kv_cache_gib` have no effect. Reason: {reason}."
            )
    return LockStepEngine(HFGenerator(model, end, generation_config, synced_gpus), polls_together=synced_gpus)


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)
