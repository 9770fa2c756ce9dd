"""Samples the next token of many rows at once, each with its own random numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

_BLOCK = 64  # random numbers drawn at a time
_BELOW_ONE = 1 - 2**-32  # keeps rounding from putting a draw beyond the last token


def resolved(generation_config: GenerationConfig, model: PreTrainedModel) -> GenerationConfig:
    """The config as `generate` reads it: None means `model.generation_config`'s value, and then the global default."""
    config: Any = copy.deepcopy(generation_config)
    config.update(**model.generation_config.to_dict(), defaults_only=True, allow_custom_entries=True)
    config.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
    filled: GenerationConfig = config
    return filled


def draws(base: int, row: int) -> Iterator[float]:
    """An endless stream of uniform numbers in [0, 1), determined by `base` and `row`.

    They are NumPy's, because `torch.Generator` keeps 32 bits of its seed: rows of different rollouts would coincide.
    """
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence((base, row))))
    while True:
        yield from generator.random(_BLOCK).tolist()


class Sampler:
    """Chooses tokens as `generate` does: by temperature, top-k, top-p and min-p, in that order, or the likeliest.

    `is_random` says whether it needs random numbers.
    """

    def __init__(self, config: GenerationConfig) -> None:
        self.is_random = bool(config.do_sample)
        self._processors: Any = LogitsProcessorList()
        if not self.is_random:
            return
        if config.temperature is not None and config.temperature != 1.0:
            self._processors.append(TemperatureLogitsWarper(config.temperature))
        if config.top_k:
            self._processors.append(TopKLogitsWarper(config.top_k))
        if config.top_p is not None and config.top_p < 1.0:
            self._processors.append(TopPLogitsWarper(config.top_p))
        if config.min_p is not None:
            self._processors.append(MinPLogitsWarper(config.min_p))

    def choose(
        self, logits: torch.Tensor, uniforms: Sequence[float], logprobs_at: float | None = None
    ) -> tuple[list[int], list[float] | None]:
        """Choose a token per row of `logits` (B, V).

        With a temperature `logprobs_at`, return its log-probability among all tokens at that temperature as well,
        whatever top-k, top-p and min-p have left to choose from.

        `uniforms` has one number per row, or none where the likeliest token is chosen.
        """
        # None of these processors reads the ids that it is given.
        scores: torch.Tensor = self._processors(None, logits.float())
        if self.is_random:
            chosen = _at(torch.tensor(uniforms, dtype=torch.float64), scores)
        else:
            chosen = scores.argmax(-1, keepdim=True)
        if logprobs_at is None:
            return chosen[:, 0].tolist(), None
        said = torch.log_softmax(logits.float() / logprobs_at, -1).gather(-1, chosen)
        return chosen[:, 0].tolist(), said[:, 0].tolist()


def _at(uniforms: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The tokens at these points of the cumulative distributions; never a token with probability 0.

    Raises RuntimeError if the scores are NaN or infinite.
    """
    # Convert first: `cumsum(dtype=…)` takes three times as long.
    cumulative = torch.softmax(scores, -1).double().cumsum(-1)
    points = uniforms.to(scores.device)[:, None] * _BELOW_ONE * cumulative[:, -1:]
    if not points.isfinite().all():
        raise RuntimeError("the policy's logits are NaN or infinite: there is nothing to sample from")
    return torch.searchsorted(cumulative, points, right=True)
