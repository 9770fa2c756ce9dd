"""Routing replay: a mixture of experts is trained with the experts that the sampling engine chose.

Source: R3 (arXiv 2510.11370), also in MiniRL (arXiv 2512.01374). The old-policy pass and gradient passes reuse the
engine's experts. Their choice is a constant; their weights are the router's own, and have its gradient. The policy in
training differs from the one that chooses for itself from the first update on. A router loss reads the live logits.

The reference model, the critic's own model and evaluation choose for themselves. Prompts and observations are replayed
like the policy's own tokens, because their experts, too, decide what the policy's tokens read. Rows are packed, but
beginnings in common are not shared, because their experts may differ. The experts of N tokens in L layers with k
experts each take 2 · N · L · k bytes: 75 MiB for 256 trajectories of 400 tokens with Qwen3-30B-A3B.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sorl_trl.rollout.routing import LIVE, ROUTES, Routers
from sorl_trl.rollout.trajectories import laid_out_routes
from sorl_trl.trainers.adapters import within_and_recomputed
from sorl_trl.trainers.critic import CRITIC_ATTRIBUTE
from sorl_trl.trainers.host import Host
from sorl_trl.trainers.layouts import Plan
from sorl_trl.types import Trajectory


@dataclass(frozen=True)
class Routing:
    """A pass over a batch: a mixture's routers follow the batch's `routes`, and record their own choices."""

    routers: Routers
    routes: Sequence[Tensor]
    chosen: list[Tensor] = field(default_factory=list)
    """The experts that the routers would have chosen, in the form of `ROUTES`."""

    @contextmanager
    def around(self, model: Any, plan: Plan, rows: slice, mask: Tensor) -> Iterator[None]:
        """Context in which `model` reads `rows` of the batch as planned; `mask` (rows, W) marks their tokens."""
        assert plan.sources is not None, "texts that share a beginning may differ in its routes"
        read = (plan.sources >= 0).nonzero().squeeze(1)
        order = (mask.flatten().cumsum(0) - 1)[plan.sources[read]]  # of what is read, among the tokens of the rows
        own = torch.cat([*self.routes[rows]]).to(mask.device)
        routes = own.new_full((plan.sources.numel(), *self.routers.shape), LIVE).index_copy(0, read, own[order])
        again = within_and_recomputed(model.modules(), lambda: self.routers.replayed(routes))
        with self.routers.replayed(routes) as chosen, again:
            yield
        self.chosen.extend(torch.split(chosen()[read][order.argsort()].to(torch.int16), mask.sum(1).tolist()))

    def rerouted(self) -> dict[str, tuple[Tensor, Tensor]]:
        """For the log: the replayed tokens at which some router would have chosen other experts."""
        chosen = torch.cat(self.chosen)
        routes = torch.cat([*self.routes]).to(chosen.device)
        others = (routes.sort(2).values != chosen.sort(2).values).flatten(1).any(1)  # in whatever order
        return {"router_replay/rerouted": (others.float(), (routes != LIVE).flatten(1).any(1))}


def replayed_routers(host: Host, policy: Any) -> Routers | None:
    """The policy's routers, or None without `router_replay`. Raises ValueError for what cannot be replayed."""
    args, problem = host.args, None
    if args.router_replay == "none":
        return None
    if host.checkpoints_activations:
        problem = "FSDP's `fsdp_activation_checkpointing` recomputes without replay: use `gradient_checkpointing`"
    elif getattr(getattr(policy, CRITIC_ATTRIBUTE, None), "kind", None) == "adapter":
        problem = "`critic` is 'adapter', which runs the policy's layers a second time: use 'head' or 'model'"
    if problem is not None:
        raise ValueError(f"`router_replay` is {args.router_replay!r}, but {problem}.")
    return Routers(policy)


def engine_routes(
    batch: Mapping[str, Any], trajectories: Sequence[Trajectory], shape: tuple[int, int]
) -> list[Tensor]:
    """The experts that an engine chose, as `ROUTES`: those that a function returned, or else those of the turns.

    Raises ValueError if they are missing or have another shape.
    """
    given = [each.columns.get(ROUTES) for each in trajectories]
    turns = [turn for each in trajectories for turn in each.turns]
    if turns and all(each is None for each in (*given, *(turn.routes for turn in turns))):
        raise ValueError(
            "`router_replay` is 'r3', but the rollout did not return `routes`, the experts that its engine chose: use "
            "`SearchRollout`, `AgentRollout` or `EndpointRollout`."
        )
    lengths = (batch["prompt_mask"].sum(1) + batch["completion_mask"].sum(1)).tolist()
    routes = []
    for number, (each, own, length) in enumerate(zip(trajectories, given, lengths, strict=True)):
        found = laid_out_routes(each, shape) if own is None else own
        wanted = (len(each.prompt_ids) + len(each.completion_ids), *shape)
        if tuple(found.shape) != wanted:
            raise ValueError(
                f"The rollout's `routes` have the shape {tuple(found.shape)} in row {number}, but must have {wanted}: "
                "tokens of prompt and completion, mixture layers, experts of a token."
            )
        # A completion that is masked because it was cut is not read.
        routes.append(torch.as_tensor(found[:length], dtype=torch.int16))
    return routes


def log_gaps(host: Host, batch: Mapping[str, Any], logps: Tensor) -> None:
    """Log the mean |log π_old − log μ| to the engine μ with replay, and with `log_turn_details` also without."""
    sampling = batch.get("sampling_per_token_logps")
    if sampling is None:
        return
    passes = {"": logps}
    if host.args.log_turn_details:
        passes["_without"] = host.score(host.model, batch).logps
    for name, found in passes.items():
        kept = (batch["turn_ids"] >= 0) & ~sampling.isnan()
        host.log_mean(f"router_replay/logp_gap{name}", (found - sampling).abs(), kept)
