"""Routing replay: a mixture of experts is trained with the experts that the sampling engine chose.

Source: R3 (arXiv 2510.11370), also in MiniRL (arXiv 2512.01374). The old-policy pass and gradient passes reuse the
engine's experts. Their choice is a constant; their weights, such as e^{s_i} / Σ_j e^{s_j} over the chosen j, are the
router's own, and have its gradient. The policy in training differs from the one that chooses for itself from the first
update on. A router loss reads the live logits.

The reference model, the critic's own model and evaluation choose for themselves. Prompts and observations are replayed
like the policy's own tokens, because their experts, too, decide what the policy's tokens read. Rows are packed, but
beginnings in common are not shared, because their experts may differ.

This module has all of it. Elsewhere, `routes` is a field that engines report (`Routers.recorded`, `Routers.of_vllm`),
that turns carry, that becomes a field of the batch (`packed_routes`), and that a pass reads (`Replay`). The experts of
N tokens in L layers with k experts each take N · L · k bytes in the turns that read them first, and twice that in the
batch: 75 MiB for 256 trajectories of 400 tokens with Qwen3-30B-A3B.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sorl_trl.types import Trajectory, Turn

ROUTES = "routes"
"""Key of a rollout and a batch: for each row (n, L, k) int16, the experts of its n tokens in each layer, or `LIVE`."""
LIVE = -1
"""Placeholder for an expert: the router chooses freely for this token."""
_SOFTMAX = ("Qwen2MoeTopKRouter", "Qwen3MoeTopKRouter", "OlmoeTopKRouter", "MixtralTopKRouter", "GptOssTopKRouter")
_SIGMOID = ("DeepseekV3TopkRouter", "Glm4MoeTopkRouter")


def asks_for_routes(args: Any) -> bool:
    """Whether a trainer's config requests the experts that the engine chooses. TRL's own never does."""
    return bool(getattr(args, "router_replay", "none") == "r3")


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
        self._layers = [int(path.split("layers.")[1].split(".")[0]) for path in found]
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

    def recorded(self, forward: Callable[[], Tensor], rows: int) -> tuple[Tensor, np.ndarray[Any, Any]]:
        """The result of a pass over (rows, n) tokens, and the experts (rows, n, L, k) that it chose."""
        with self.replayed() as chosen:
            found = forward()
        return found, _compact(chosen().reshape(rows, -1, *self.shape).cpu().numpy())

    def of_vllm(self, reported: Any) -> np.ndarray[Any, Any]:
        """The experts (n, L, k) in vLLM's report of all layers, which is an array, or a file of one in base64.

        Raises RuntimeError if vLLM did not record them.
        """
        if isinstance(reported, str):
            reported = np.load(io.BytesIO(base64.b64decode(reported)))
        found = np.zeros((1, 1, 2)) if reported is None else reported[:, self._layers]
        if found.shape[2] > 1 and (found[..., 0] == found[..., 1]).any():  # one expert twice: it was not recorded
            raise RuntimeError(
                "`router_replay` is 'r3', but vLLM does not report which experts it chose: start its server with "
                "`--enable-return-routed-experts`. If that is set already, choose another mixture-of-experts kernel."
            )
        return _compact(found)


def _compact(experts: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """In one byte each, if there are at most 256."""
    return experts.astype(np.min_scalar_type(int(experts.max())))


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


# -------------------------------------------------------------------------------------------------------------------
# From turns to a batch
# -------------------------------------------------------------------------------------------------------------------


def newly_read(routes: np.ndarray[Any, Any] | None, known: int) -> np.ndarray[Any, Any] | None:
    """An engine's report without that of the `known` first tokens, which an earlier turn has."""
    return None if routes is None else routes[known:].copy()  # or the whole report would stay in memory


def laid_out_routes(trajectory: Trajectory, shape: tuple[int, int]) -> np.ndarray[Any, Any]:
    """The (n, L, k) experts that the engine chose for each of the n tokens of prompt and completion.

    They are `LIVE` where unknown: from the last token of a context's last turn on. Raises RuntimeError if a turn's
    routes do not cover exactly what it was the first to read.
    """
    place = len(trajectory.prompt_ids)
    routes = np.full((place + len(trajectory.completion_ids), *shape), LIVE, dtype=np.int16)
    unread = {0: [*range(place)]}
    for segment in trajectory.segments:
        own = unread.setdefault(segment.context, [])
        own += range(place, place := place + len(segment.token_ids))
        if isinstance(segment, Turn):
            *new, last = own
            unread[segment.context] = [last]  # which the context's next turn reads
            if segment.routes is not None and len(segment.routes) != len(new):
                raise RuntimeError(f"an engine reported routes of {len(segment.routes)} new tokens, not {len(new)}")
            if segment.routes is not None:
                routes[new] = segment.routes
    return routes


def output_routes(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """What a `rollout_func` returns under `ROUTES`; empty if no turn has any."""
    found = [turn.routes for each in trajectories for turn in each.turns if turn.routes is not None]
    return {ROUTES: [laid_out_routes(each, found[0].shape[1:]) for each in trajectories]} if found else {}


def packed_routes(
    trajectories: Sequence[Trajectory], lengths: Sequence[int], shape: tuple[int, int]
) -> dict[str, list[Tensor]]:
    """`ROUTES` of a batch, of the first tokens: those that a function returned, or else those of the turns.

    Raises ValueError if they are missing or have another shape.
    """
    given = [each.columns.get(ROUTES) for each in trajectories]
    turns = [turn for each in trajectories for turn in each.turns]
    if turns and all(each is None for each in (*given, *(turn.routes for turn in turns))):
        raise ValueError(
            "`router_replay` is 'r3', but the rollout did not return `routes`, the experts that its engine chose: use "
            "`SearchRollout`, `AgentRollout` or `EndpointRollout`."
        )
    routes = []
    for number, (each, own, length) in enumerate(zip(trajectories, given, lengths, strict=True)):
        found = laid_out_routes(each, shape) if own is None else own
        wanted = (len(each.prompt_ids) + len(each.completion_ids), *shape)
        if tuple(found.shape) != wanted:
            raise ValueError(
                f"The rollout's `routes` have the shape {tuple(found.shape)} in row {number}, but must have {wanted}: "
                "tokens of prompt and completion, mixture layers, experts of a token."
            )
        routes.append(torch.as_tensor(found[:length], dtype=torch.int16))
    return {ROUTES: routes}


# -------------------------------------------------------------------------------------------------------------------
# In a pass of the trainer
# -------------------------------------------------------------------------------------------------------------------


def replayed_routers(policy: Any, router_replay: str, critic: str | None, is_recomputed: bool) -> Routers | None:
    """The policy's routers, or None without `router_replay`.

    Raises ValueError for what cannot be replayed: FSDP recomputes activations, or the kind of critic.
    """
    problem = None
    if router_replay == "none":
        return None
    if is_recomputed:
        problem = "FSDP's `fsdp_activation_checkpointing` recomputes without replay: use `gradient_checkpointing`"
    elif critic == "adapter":
        problem = "`critic` is 'adapter', which runs the policy's layers a second time: use 'head' or 'model'"
    if problem is not None:
        raise ValueError(f"`router_replay` is {router_replay!r}, but {problem}.")
    return Routers(policy)


class Replay:
    """A pass over a batch: a mixture's routers follow the batch's `routes`, and record their own choices."""

    def __init__(self, routers: Routers, routes: Sequence[Tensor], chosen: Sequence[Tensor] = ()) -> None:
        self._routers, self._routes, self._chosen = routers, routes, [*chosen]

    @contextmanager
    def around(
        self,
        rows: slice,
        mask: Tensor,
        sources: Tensor | None,
        recomputed: Callable[[Callable[[], Any]], AbstractContextManager[None]],
    ) -> Iterator[None]:
        """Context in which the model reads `rows` of the batch.

        Args:
            rows: These rows.
            mask: (rows, W) marks their tokens.
            sources: The position in the flattened mask of each token that the model reads, -1 for padding.
            recomputed: Makes a context that backward enters again where it recomputes.
        """
        assert sources is not None, "texts that share a beginning may differ in its routes"
        read = (sources >= 0).nonzero().squeeze(1)
        order = (mask.flatten().cumsum(0) - 1)[sources[read]]  # of what is read, among the tokens of the rows
        own = torch.cat([*self._routes[rows]]).to(mask.device)
        routes = own.new_full((sources.numel(), *self._routers.shape), LIVE).index_copy(0, read, own[order])
        with self._routers.replayed(routes) as chosen, recomputed(lambda: self._routers.replayed(routes)):
            yield
        self._chosen.extend(torch.split(chosen()[read][order.argsort()].to(torch.int16), mask.sum(1).tolist()))

    def metrics(self) -> dict[str, tuple[Tensor, Tensor]]:
        """For the log: the replayed tokens at which some router would have chosen other experts."""
        chosen = torch.cat(self._chosen)
        routes = torch.cat([*self._routes]).to(chosen.device)
        others = (routes.sort(2).values != chosen.sort(2).values).flatten(1).any(1)  # in whatever order
        return {"router_replay/rerouted": (others.float(), (routes != LIVE).flatten(1).any(1))}


def replay_gaps(
    batch: Mapping[str, Any], logps: Tensor, live: Callable[[], Tensor] | None
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """For the log: |log π_old − log μ| to the engine μ with replay, and without it (`live`), where it is known."""
    if (sampling := batch.get("sampling_per_token_logps")) is None:
        return
    kept = (batch["turn_ids"] >= 0) & ~sampling.isnan()
    yield "router_replay/logp_gap", (logps - sampling).abs(), kept
    if live is not None:
        yield "router_replay/logp_gap_without", (live() - sampling).abs(), kept
