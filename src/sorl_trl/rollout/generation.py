"""One generation call for many rows, each with its own end and its own limit."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

# Look back a little further, because a token may add no character (part of one, a dropped space).
_TAIL_MARGIN = 8


@dataclass(frozen=True)
class Generation:
    """The tokens that one row sampled in one call.

    `token_ids` has every sampled id, including the end-of-sequence token; its last token may extend beyond the stop
    string. `logprobs` are those of the sampling engine, one per token, if it reports them. `stopped` tells whether a
    stop string or an end-of-sequence token ended the row, even with its last allowed token; otherwise `max_new_tokens`
    did. `versions` are those of the weights when the turn was requested and when it was complete, if they can change.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    stopped: bool
    versions: tuple[int, int] | None = None


class Generator(Protocol):
    """Samples from the policy: token ids in, token ids out.

    If it can read only a limited number of tokens, context and generation together, it sets an attribute `window`, and
    the collector never asks for more. Without the attribute, or with None, there is no limit.
    """

    def generate(self, contexts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> list[Generation]:
        """Generate 1 to `max_new_tokens[row]` tokens for each context, in order."""
        ...


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
        """How many of the last tokens to look at: a stop string before them would have ended the turn earlier."""

    def reached(self, sampled: Sequence[Sequence[int]]) -> list[bool]:
        """Whether each row's last token ended its turn, given all tokens that it has sampled, or the last `tail`."""
        texts: list[str] = self.tokenizer.batch_decode(
            [list(ids[-self.tail :]) for ids in sampled],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        return [
            ids[-1] in self.eos_token_ids or any(stop in text for stop in self.stop_strings)
            for ids, text in zip(sampled, texts, strict=True)
        ]


class HFGenerator:
    """Samples with `model.generate`: one left-padded batch per call.

    The caller sets eval mode and gathers sharded parameters; no gradient is recorded. With `synced_gpus`, every rank
    must make the same number of calls. `generation_config` says how to sample (temperature, top-p, …); options at None
    come from `model.generation_config`, as always in transformers. Ends and lengths are set here.

    Raises ValueError if `generation_config` returns more than one row per context, or `eos_token_ids` is empty.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        stop_strings: Sequence[str],
        generation_config: GenerationConfig,
        eos_token_ids: Sequence[int],
        synced_gpus: bool = False,
    ) -> None:
        for name in ("num_beams", "num_return_sequences"):
            if (value := getattr(generation_config, name)) not in (None, 1):
                raise ValueError(f"generation_config.{name}={value} must be 1: each context has one continuation")
        self._model = model
        self._end = TurnEnd(tokenizer, stop_strings, eos_token_ids)
        self.window = positions_of(model)
        """The number of positions of the model, if its config tells."""
        self._synced_gpus = synced_gpus
        # Padding is masked out and never read back, so any id will do.
        self._pad_token_id = eos_token_ids[0]
        self._config = copy.deepcopy(generation_config)
        self._config.eos_token_id = list(eos_token_ids)
        self._config.pad_token_id = self._pad_token_id
        self._config.max_length = None
        self._config.return_dict_in_generate = False

    def generate(self, contexts: Sequence[Sequence[int]], max_new_tokens: Sequence[int]) -> list[Generation]:
        """See `Generator`."""
        if not contexts:
            return []
        input_ids, attention_mask = self._left_padded(contexts)
        stops = _RowStops(self._end, input_ids.shape[1], max_new_tokens)
        config = copy.copy(self._config)
        config.max_new_tokens = max(max_new_tokens)
        model: Any = self._model
        output = model.generate(
            input_ids=input_ids,
            attention_mask=attention_mask,
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([stops]),
            synced_gpus=self._synced_gpus,
        )
        sampled = output[:, input_ids.shape[1] :].tolist()
        return [
            Generation(tuple(row[:length]), None, stopped)
            for row, length, stopped in zip(sampled, stops.lengths, stops.stopped, strict=True)
        ]

    def _left_padded(self, contexts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and attention mask, each (B, longest context), on the model's device."""
        width = max(map(len, contexts))
        ids = [[self._pad_token_id] * (width - len(context)) + list(context) for context in contexts]
        mask = [[0] * (width - len(context)) + [1] * len(context) for context in contexts]
        device = self._model.device
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


class _RowStops(StoppingCriteria):
    """Ends each row where it stops, and remembers where, because `generate` fills ended rows with padding."""

    def __init__(self, end: TurnEnd, context_length: int, limits: Sequence[int]) -> None:
        self._end = end
        self._context_length = context_length
        self._limits = limits
        self.lengths = [0] * len(limits)
        """The number of sampled tokens of each row that has ended; 0 for the others."""
        self.stopped = [False] * len(limits)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        produced = input_ids.shape[1] - self._context_length
        live = [row for row, length in enumerate(self.lengths) if not length]
        tails = input_ids[live, -min(produced, self._end.tail) :].tolist()
        for row, stopped in zip(live, self._end.reached(tails), strict=True):
            self.stopped[row] = stopped
            if stopped or produced >= self._limits[row]:
                self.lengths[row] = produced
        return torch.tensor([length > 0 for length in self.lengths], device=input_ids.device)


def positions_of(model: PreTrainedModel) -> int | None:
    """The number of positions of a model; None if it has no limit, so that its config gives no positive number."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return positions if positions and positions > 0 else None
