"""Generates whole turns for all rows at once, in lock-step: `model.generate`, or any `Generator`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

from sorl_trl.rollout.engines.base import Engine, Generation, TurnEnd, TurnRequest, positions_of

# A rank without live rows generates from this: id 0 is in every vocabulary, and the result is discarded.
_DUMMY_CONTEXT = (0,)


class Generator(Protocol):
    """Samples from the policy: token ids in, token ids out.

    If context and generation together are limited in tokens, it sets an attribute `window`, and the collector never
    exceeds it. Without the attribute, or with None, there is no limit.

    If rows have their own stop strings, `generate` gets them as a third argument, `stops`: a sequence of strings per
    row. It is passed only if at least one row has any.
    """

    def generate(self, contexts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> list[Generation]:
        """Generate 1 to `max_new_tokens[row]` tokens for each context, in order."""
        ...


class LockStepEngine(Engine):
    """Any `Generator` as an engine: each poll generates a whole turn for all submitted rows.

    A poll makes exactly one call. With `polls_together` and nothing submitted, that call generates one token, which is
    discarded, because every rank must make the same number of calls if parameters are sharded over ranks (FSDP, ZeRO-3
    without gathering) or one engine serves all ranks.
    """

    in_turns = True

    def __init__(self, generator: Generator, polls_together: bool = False) -> None:
        self._generator = generator
        self.polls_together = polls_together
        self._submitted: dict[int, TurnRequest] = {}
        self.prefilled_tokens = 0
        """Context tokens that went through the model in this rollout, without padding."""
        self.window = getattr(generator, "window", None)

    def open(self, rows: int) -> None:
        self._submitted = {}
        self.prefilled_tokens = 0

    def submit(self, request: TurnRequest) -> None:
        assert request.schema is None, "this engine cannot follow a schema"
        self._submitted[request.row] = request

    def poll(self) -> list[tuple[int, Generation]]:
        submitted, self._submitted = self._submitted, {}
        rows = sorted(submitted)
        if not rows:
            if self.polls_together:
                self._generator.generate([_DUMMY_CONTEXT], [1])
            return []
        contexts, limits = [submitted[row].token_ids for row in rows], [submitted[row].limit for row in rows]
        stops = [submitted[row].stops for row in rows]
        options: dict[str, Any] = {"stops": stops} if any(stops) else {}
        generations = self._generator.generate(contexts, limits, **options)
        self.prefilled_tokens += sum(map(len, contexts))
        return list(zip(rows, generations, strict=True))

    def release(self, row: int) -> None:
        self._submitted.pop(row, None)

    @property
    def idle(self) -> bool:
        return not self._submitted


class HFGenerator:
    """Samples with `model.generate`: one left-padded batch per call.

    The caller sets eval mode and gathers sharded parameters; no gradient is recorded. With `synced_gpus`, every rank
    must make the same number of calls. `generation_config` sets how to sample (temperature, top-p, …); options at None
    come from `model.generation_config`, as in transformers. Ends and lengths are set here.

    Raises ValueError if `generation_config` returns more than one row per context.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        end: TurnEnd,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
    ) -> None:
        for name in ("num_beams", "num_return_sequences"):
            if (value := getattr(generation_config, name)) not in (None, 1):
                raise ValueError(f"generation_config.{name}={value} must be 1: each context has one continuation")
        self._model = model
        self._end = end
        self.window = positions_of(model)
        """The number of positions of the model, if its config tells."""
        self._synced_gpus = synced_gpus
        # Padding is masked out and never read back, so any id will do.
        self._pad_token_id = end.eos_token_ids[0]
        self._config = copy.deepcopy(generation_config)
        self._config.eos_token_id = list(end.eos_token_ids)
        self._config.pad_token_id = self._pad_token_id
        self._config.max_length = None
        self._config.return_dict_in_generate = False

    def generate(
        self,
        contexts: Sequence[Sequence[int]],
        max_new_tokens: Sequence[int],
        stops: Sequence[Sequence[str]] | None = None,
    ) -> list[Generation]:
        """See `Generator`."""
        if not contexts:
            return []
        input_ids, attention_mask = self._left_padded(contexts)
        ends = _RowEnds(self._end, input_ids.shape[1], max_new_tokens, stops or [()] * len(contexts))
        config = copy.copy(self._config)
        config.max_new_tokens = max(max_new_tokens)
        model: Any = self._model
        output = model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([ends]),
            synced_gpus=self._synced_gpus,
        )
        sampled = output[:, input_ids.shape[1] :].tolist()
        return [
            Generation(tuple(row[:length]), None, stopped)
            for row, length, stopped in zip(sampled, ends.lengths, ends.stopped, strict=True)
        ]

    def _left_padded(self, contexts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and attention mask, each (B, longest context), on the model's device."""
        width = max(map(len, contexts))
        ids = [[self._pad_token_id] * (width - len(context)) + list(context) for context in contexts]
        mask = [[0] * (width - len(context)) + [1] * len(context) for context in contexts]
        device = self._model.device
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


class _RowEnds(StoppingCriteria):
    """Ends each row where it stops, and records where, because `generate` fills ended rows with padding."""

    def __init__(
        self, end: TurnEnd, context_length: int, limits: Sequence[int], stops: Sequence[Sequence[str]]
    ) -> None:
        self._end = end
        self._context_length = context_length
        self._limits = limits
        self._stops = stops
        self._tail = max(map(end.tail_with, stops))
        self.lengths = [0] * len(limits)
        """The number of sampled tokens of each row that has ended; 0 for the others."""
        self.stopped = [False] * len(limits)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        produced = input_ids.shape[1] - self._context_length
        live = [row for row, length in enumerate(self.lengths) if not length]
        tails = input_ids[live, -min(produced, self._tail) :].tolist()
        ended = self._end.reached(tails, [self._stops[row] for row in live])
        for row, stopped in zip(live, ended, strict=True):
            self.stopped[row] = stopped
            if stopped or produced >= self._limits[row]:
                self.lengths[row] = produced
        return torch.tensor([length > 0 for length in self.lengths], device=input_ids.device)
