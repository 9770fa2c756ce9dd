"""The experts that a mixture's routers choose: recorded, and imposed on a later pass (routing replay).

Sources: MiniRL (arXiv 2512.01374) for R2 and R3, and R3's own paper (arXiv 2510.11370). The imposed choice is a
constant, and gradients reach the router through the weights of the chosen experts:

    g_i = I_i e^{s_i} / Σ_j I_j e^{s_j}

where s are the router's own logits and I is 1 for the k recorded experts. Routers that weigh experts in another way
keep their way. What a router loss reads are the logits, which stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

LIVE = -1
"""In the place of an expert: the router chooses for this token itself."""
Weights: TypeAlias = Callable[[Any, Tensor, Tensor], Tensor]


def _of_all(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """A softmax over all experts, whose chosen part is scaled to a sum of 1 if `norm_topk_prob` says so."""
    weights = torch.softmax(logits.float(), dim=-1).gather(1, experts)
    return weights / weights.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else weights


def _of_chosen(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """A softmax over the chosen experts."""
    return torch.softmax(logits.gather(1, experts), dim=-1, dtype=logits.dtype)


def _of_each(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """A sigmoid of each expert's logit, without the bias that only the choice knows; scaled as DeepSeek-V3 does."""
    weights: Tensor = logits.sigmoid().gather(1, experts)
    if router.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * float(router.routed_scaling_factor)


WEIGHTS: Mapping[str, Weights] = {
    **dict.fromkeys(("Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "OlmoeTopKRouter", "MixtralTopKRouter"), _of_all),
    **dict.fromkeys(("GptOssTopKRouter",), _of_chosen),
    **dict.fromkeys(("DeepseekV3TopkRouter", "Glm4MoeTopkRouter"), _of_each),
}
"""How the routers of transformers weigh the experts that they have chosen, by the name of their class."""


class Routers:
    """The L routers of a model's decoder, in the order of its layers; each chooses k experts for each token.

    Raises:
        ValueError: The model has no router, or one of a family that is not in `WEIGHTS`.
    """

    def __init__(self, model: Any) -> None:
        name = type(model).__name__
        # The backbone alone, because a critic may have routers of its own.
        found = {
            path: each
            for path, each in model.base_model.named_modules()
            if type(each).__name__.lower().endswith("router")
        }
        if not found:
            raise ValueError(f"{name} has no router, but routing replay is for mixtures of experts.")
        if unknown := sorted({type(each).__name__ for each in found.values()} - WEIGHTS.keys()):
            raise ValueError(
                f"{name} has routers of another kind, {unknown[0]}, but they must be {', '.join(WEIGHTS)}."
            )
        self._modules = [*found.values()]
        self._is_hooked = False
        self.shape = len(found), int(self._modules[0].top_k)
        """(L, k)."""
        self.layers = [int(path.split("layers.")[1].split(".")[0]) for path in found]
        """The index of each router's layer among all layers, of which some may be dense."""

    @contextmanager
    def recorded(self) -> Iterator[Callable[[], Tensor]]:
        """Within it, passes of this thread record. The function returns (n, L, k) of the last one, over n tokens."""
        chosen: dict[int, Tensor] = {}
        own = get_ident()  # others may sample from the same model

        def record(layer: int, _router: nn.Module, _args: Any, output: Any) -> None:
            if get_ident() == own:
                chosen[layer] = output[2].detach()

        with self._hooked(record):
            yield lambda: torch.stack([chosen[layer] for layer in range(self.shape[0])], dim=1)

    @contextmanager
    def imposed(self, routes: Tensor, rerouted: Tensor | None = None) -> Iterator[None]:
        """Within it, passes over n tokens take the experts (n, L, k) of `routes`, and choose where these are `LIVE`.

        `rerouted` (n,) bool becomes True where some router would have chosen other experts. Within another such
        context, it does nothing.
        """

        def impose(layer: int, router: Any, _args: Any, output: Any) -> tuple[Tensor, Tensor, Tensor]:
            logits, weights, live = output
            recorded = routes[:, layer].to(live.dtype)
            experts = torch.where(recorded == LIVE, live, recorded)
            if rerouted is not None:
                rerouted.logical_or_((experts.unsqueeze(2) != live.unsqueeze(1)).all(2).any(1))
            return logits, WEIGHTS[type(router).__name__](router, logits, experts).to(weights.dtype), experts

        with self._hooked(impose):
            yield

    @contextmanager
    def _hooked(self, hook: Callable[..., Any]) -> Iterator[None]:
        if self._is_hooked:
            yield
            return
        handles = [module.register_forward_hook(partial(hook, layer)) for layer, module in enumerate(self._modules)]
        self._is_hooked = True
        try:
            yield
        finally:
            self._is_hooked = False
            for handle in handles:
                handle.remove()
