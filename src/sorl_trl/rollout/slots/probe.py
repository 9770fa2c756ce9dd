"""What no config tells: whether a model reads the cache, the mask and the positions that it is given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from sorl_trl.rollout.slots.cache import SlotCache
from sorl_trl.rollout.slots.forward import Forward
from sorl_trl.rollout.slots.support import NotServed

_IDS = (0, 1, 2, 1)
_TOLERANCE = 0.05  # of the largest logit: what half precision rounds is smaller, what a wrong mask does is not


def bytes_per_token(model: Any, base: PreTrainedModel) -> int:
    """What a token takes in the cache of slots.

    Takes three short forwards: a few tokens as they are, and again in a slot, in two parts, beside a longer row.
    Raises NotServed where the two disagree, or the model fails on it or does not use the cache.
    """
    ids = [each % base.config.get_text_config().vocab_size for each in _IDS]
    cache = SlotCache(2, len(ids))
    with torch.no_grad(), _in_eval_mode(model):
        plain = model(input_ids=torch.tensor([ids], device=base.device), use_cache=False).logits[0, -1].float()
        try:
            logits = _in_slots(Forward(model, base), cache, ids)
        except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            raise NotServed(f"{type(base).__name__} failed on a cache of slots ({error})") from error
    if not cache.layers_written:
        raise NotServed(f"{type(base).__name__} does not use the cache that it is given")
    off = (logits - plain).abs().max()
    if plain.isfinite().all() and not off <= _TOLERANCE * plain.abs().max():
        raise NotServed(f"{type(base).__name__} computes other logits with slots (off by {off:.2g})")
    return cache.bytes_per_token


def _in_slots(forward: Forward, cache: SlotCache, ids: list[int]) -> torch.Tensor:
    """The logits after `ids`, of which the second slot holds more, padded in the first prefill."""
    forward.prefill(cache, 0, [ids[:-2], ids[:-1]], [0, 0])
    forward.prefill(cache, 0, [ids[-2:-1]], [len(ids) - 2])
    return forward.decode(cache, [ids[-1], ids[-1]], [len(ids) - 1] * 2)[0].float()


@contextmanager
def _in_eval_mode(model: Any) -> Iterator[None]:
    """Without dropout, and without a trace of it: neither modes nor random generators change."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True
