"""The experts that a mixture's routers choose: recorded, and imposed on a later pass (routing replay).

The imposed choice is a constant. Gradients reach the router through the weights of the chosen experts, such as e^{s_i}
/ Σ_j e^{s_j} over the chosen j, where s are its own logits. A router loss reads these logits unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

ROUTES = "routes"
"""Key of a rollout and a batch: for each row (n, L, k) int16, the experts of its n tokens in each layer, or `LIVE`."""
LIVE = -1
"""Placeholder for an expert: the router chooses freely for this token."""
_SOFTMAX = ("Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "OlmoeTopKRouter", "MixtralTopKRouter", "GptOssTopKRouter")
_SIGMOID = ("DeepseekV3TopkRouter", "Glm4MoeTopkRouter")


class Routers:
    """The L routers of a model's decoder, in the order of its layers; each chooses k experts for each token.

    Raises ValueError if the model has no router, or one of an unsupported family.
    """

    def __init__(self, model: Any) -> None:
        name = type(model).__name__
        # The backbone alone, because a critic may have routers of its own, and not what PEFT has copied to train.
        named = (each for each in model.base_model.named_modules() if "original_module" not in each[0])
        found = {path: each for path, each in named if type(each).__name__.lower().endswith("router")}
        if not found:
            raise ValueError(f"{name} has no router, but routing replay needs a mixture of experts.")
        if unknown := sorted({type(each).__name__ for each in found.values()} - {*_SOFTMAX, *_SIGMOID}):
            known = ", ".join(_SOFTMAX + _SIGMOID)
            raise ValueError(f"{name} has routers of an unsupported kind, {unknown[0]}: they must be {known}.")
        self.modules = [*found.values()]
        self._is_hooked = False
        self.shape = len(found), int(self.modules[0].top_k)
        """(L, k)."""
        self.layers = [int(path.split("layers.")[1].split(".")[0]) for path in found]
        """The index of each router's layer among all layers, including dense ones."""

    @contextmanager
    def replayed(self, routes: Tensor | None = None) -> Iterator[Any]:
        """Context in which passes over n tokens use the experts (n, L, k) of `routes`, except where these are `LIVE`.

        The yielded function returns the routers' own choices in this thread's last pass, (n, L, k). A nested context
        has no effect.
        """
        chosen: dict[int, Tensor] = {}
        own = get_ident()  # others may sample from the same model

        def hook(layer: int, router: Any, _args: Any, output: Any) -> Any:
            logits, weights, live = output
            if get_ident() == own:
                chosen[layer] = live.detach()
            if routes is None:
                return output
            recorded = routes[:, layer].to(live.dtype)
            experts = torch.where(recorded == LIVE, live, recorded)
            return logits, weights_of(router, logits, experts).to(weights.dtype), experts

        modules = [] if self._is_hooked else self.modules
        was_hooked, self._is_hooked = self._is_hooked, True
        handles = [each.register_forward_hook(partial(hook, layer)) for layer, each in enumerate(modules)]
        try:
            yield lambda: torch.stack([chosen[layer] for layer in range(self.shape[0])], dim=1)
        finally:
            self._is_hooked = was_hooked
            for handle in handles:
                handle.remove()


def weights_of(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """The weights of chosen experts, bit-identical to those of transformers' routers."""
    family = type(router).__name__
    if family == "GptOssTopKRouter":
        return torch.softmax(logits.gather(1, experts), dim=-1, dtype=logits.dtype)
    # The bias of DeepSeek-V3 is known to the choice alone.
    scores = logits.sigmoid() if family in _SIGMOID else torch.softmax(logits.float(), dim=-1)
    weights: Tensor = scores.gather(1, experts)
    if getattr(router, "norm_topk_prob", True):
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * float(getattr(router, "routed_scaling_factor", 1.0))
