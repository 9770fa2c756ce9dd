"""Routing replay: a mixture is trained with the experts that were chosen before (MiniRL, arXiv 2512.01374).

    R2   the experts of the old-policy pass are imposed on all gradient passes
    R3   those of the sampling engine are imposed on the old-policy pass and on all gradient passes

The reference model, the critic's own model and evaluation choose for themselves. Prompts and observations are replayed
like the policy's own tokens, because their experts, too, decide what the policy's tokens read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sorl_trl.rollout.routing import LIVE, Routers
from sorl_trl.trainers.adapters import within_and_recomputed
from sorl_trl.trainers.critic import CRITIC_ATTRIBUTE
from sorl_trl.trainers.layouts import Plan

PROMPT_ROUTES, COMPLETION_ROUTES = "prompt_routes", "completion_routes"
"""Fields of a batch: (B, P, L, k) and (B, T, L, k) int16, the experts of each token in each layer, or `LIVE`."""


@dataclass(frozen=True)
class Routing:
    """What the routers do in a pass over a batch (B, W): they take its `routes` (B, W, L, k), or record theirs."""

    routers: Routers
    routes: Tensor | None = None
    recorded: list[Tensor] = field(default_factory=list)
    """(rows, W, L, k) of each call of the model."""
    rerouted: list[Tensor] = field(default_factory=list)
    """(rows, W) bool of each call: where a router would have chosen otherwise."""

    @contextmanager
    def around(self, model: Any, plan: Plan, rows: slice, batch_ids: Tensor) -> Iterator[None]:
        """Within it, `model` reads `rows` of the batch as the plan says."""
        assert plan.sources is not None, "texts that share a beginning may differ in its routes"
        read = (plan.sources >= 0).nonzero().squeeze(1)
        places, size = plan.sources[read], (plan.sources.numel(), *self.routers.shape)
        if self.routes is None:
            with self.routers.recorded() as last:
                yield
            found = last().new_full((batch_ids.numel(), *size[1:]), LIVE, dtype=torch.int16)
            found[places] = last()[read].to(torch.int16)
            self.recorded.append(found.view(*batch_ids.shape, *size[1:]))
            return
        routes = self.routes.new_full(size, LIVE)
        routes[read] = self.routes[rows].flatten(0, 1)[places]
        rerouted = torch.zeros(len(routes), dtype=torch.bool, device=routes.device)
        with within_and_recomputed(model.modules(), partial(self.routers.imposed, routes, rerouted)):
            yield
        flags = torch.zeros(batch_ids.numel(), dtype=torch.bool, device=routes.device)
        flags[places] = rerouted[read]
        self.rerouted.append(flags.view_as(batch_ids))


def replayed_routers(trainer: Any, policy: Any) -> Routers | None:
    """The policy's routers, or None without `router_replay`.

    Raises:
        ValueError: Replay would be wrong with the trainer's other settings, or cannot replay such routers.
    """
    args, problem = trainer.args, None
    if args.router_replay == "none":
        return None
    if trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.activation_checkpointing:
        problem = "FSDP's `fsdp_activation_checkpointing` recomputes without it: use `gradient_checkpointing`"
    elif getattr(getattr(policy, CRITIC_ATTRIBUTE, None), "kind", None) == "adapter":
        problem = "`critic` is 'adapter', which runs the policy's layers once more: use 'head' or 'model'"
    elif args.router_replay == "r3" and trainer.rollout_func is None:
        problem = "no `rollout_func` says what the engine chose: use `AgentRollout` or another rollout, or 'r2'"
    if problem is not None:
        raise ValueError(f"`router_replay` is {args.router_replay!r}, but {problem}.")
    return Routers(policy)


def routes_of(batch: Mapping[str, Any]) -> Tensor | None:
    """(B, P + T, L, k), if a batch has any."""
    parts = [batch[name] for name in (PROMPT_ROUTES, COMPLETION_ROUTES) if name in batch]
    return torch.cat(parts, dim=1) if parts else None


def route_fields(batch: Mapping[str, Any], routes: Tensor) -> dict[str, Tensor]:
    """(B, P + T, L, k) as the fields of a batch."""
    width = batch["prompt_ids"].size(1)
    return {PROMPT_ROUTES: routes[:, :width], COMPLETION_ROUTES: routes[:, width:]}


def engine_routes(
    batch: Mapping[str, Any], given: Sequence[Any] | None, lengths: Sequence[tuple[int, int]], shape: tuple[int, int]
) -> Tensor:
    """What an engine has chosen, (B, P + T, L, k), for prompts and completions of these `lengths`.

    Raises:
        ValueError: The rollout has not returned `routes`, or of another shape.
    """
    if given is None:
        raise ValueError(
            "`router_replay` is 'r3', but the rollout has not returned `routes`, the experts that its engine chose: "
            "use `SearchRollout`, `AgentRollout` or `EndpointRollout`, or set it to 'r2'."
        )
    ids = batch["prompt_ids"], batch["completion_ids"]
    routes = torch.full((len(given), ids[0].size(1) + ids[1].size(1), *shape), LIVE, dtype=torch.int16)
    for number, (own, (prompt, completion)) in enumerate(zip(given, lengths, strict=True)):
        wanted = (prompt + completion, *shape)
        if tuple(own.shape) != wanted:
            raise ValueError(
                f"The rollout's `routes` have the shape {tuple(own.shape)} in row {number}, but must have {wanted}: "
                "tokens of prompt and completion, mixture layers, experts of a token."
            )
        first = ids[0].size(1) - prompt
        routes[number, first : first + prompt + completion] = torch.as_tensor(own, dtype=torch.int16)
    return routes.to(ids[0].device)


def rerouted_share(batch: Mapping[str, Any], routing: Routing | None) -> dict[str, tuple[Tensor, Tensor]]:
    """For the log: at which replayed tokens of the completions some router would have chosen other experts."""
    if routing is None or not routing.rerouted:
        return {}
    replayed = (batch[COMPLETION_ROUTES] != LIVE).flatten(2).any(2)
    rerouted = torch.cat(routing.rerouted)[:, -replayed.size(1) :]
    return {"router_replay/rerouted": (rerouted.float(), replayed)}


def log_gaps(trainer: Any, batch: Mapping[str, Any], logps: Tensor) -> None:
    """Log the mean |log π_old − log μ| to the engine μ, replayed; and with `log_turn_details` without replay, too."""
    sampling = batch.get("sampling_per_token_logps")
    if sampling is None:
        return
    kept = (batch["turn_ids"] >= 0) & ~sampling.isnan()
    trainer._log("router_replay/logp_gap", (logps - sampling).abs(), kept)
    if trainer.args.log_turn_details:
        live = trainer._score(trainer.model, batch).logps
        trainer._log("router_replay/logp_gap_without", (live - sampling).abs(), kept)
