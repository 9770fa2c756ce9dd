"""Scores trajectories: their rewards by reward functions, and what all processes know about them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from trl.trainer.utils import nanstd

from sorl_trl.methods import GroupMean, ScoredRollout
from sorl_trl.ops import turn_layout
from sorl_trl.trainers.batch import gather_rows, own_rows
from sorl_trl.trainers.host import Host
from sorl_trl.trainers.returned import padded
from sorl_trl.trainers.rewards import SAMPLES, scorable, split_rewards
from sorl_trl.trainers.samples import Sample
from sorl_trl.types import Trajectory


def score(host: Host, samples: Sequence[Sample]) -> ScoredRollout:
    """Give each sample its rewards, and log them. All processes call it together."""
    asked = [{**each.row, SAMPLES: each} for each in samples]
    ids = [each.trajectory.completion_ids for each in samples]
    rewards = host.rewards_of(asked, [each.prompt for each in samples], [each.completion for each in samples], ids)
    rewards = own_rows(scorable(host, samples, rewards), len(samples), host.accelerator)
    for each, own in zip(samples, rewards, strict=True):
        each.rewards = own
    for name, values in host.taken("extra_logs").items():
        for each, value in zip(samples, values, strict=False):
            each.extra[name] = value
    scored = scored_rollout(host, samples)
    _log_rewards(host, scored)
    _log_pending_metrics(host)
    return scored


def scored_rollout(host: Host, samples: Sequence[Sample]) -> ScoredRollout:
    """What all processes know about the N trajectories, from this process's B. All processes call it together."""
    accelerator, trajectories = host.accelerator, [each.trajectory for each in samples]
    rewards = torch.stack([each.rewards for each in samples])
    weights = host.reward_weights.to(rewards.device)
    turn_ids = padded([each.turn_ids for each in trajectories], -1).to(accelerator.device)
    num_turns = turn_layout(turn_ids).num_turns
    split = split_rewards(samples, rewards, weights, num_turns)
    gathered: dict[str, Any] = {name: gather_rows(accelerator, each) for name, each in split.items()}
    return ScoredRollout(
        turns=turn_layout(gather_rows(accelerator, turn_ids, padding=-1)),
        rewards_per_func=accelerator.gather(rewards),
        reward_names=host.reward_names,
        reward_weights=weights,
        states=gather_rows(accelerator, state_keys(trajectories, num_turns).to(accelerator.device)),
        num_generations=host.group_size,
        gamma=host.method.gamma,
        **gathered,
        **_agents(host, trajectories),
    )


def _agents(host: Host, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """The fields that give each turn's agent, masked or not; none if no turn has a name."""
    names = tuple(sorted({*gather_object(sorted({name for each in trajectories for name in each.agents}))}))
    if not any(names):
        return {}
    numbers = padded([[names.index(name) for name in each.agents] for each in trajectories], -1)
    return {"agents": gather_rows(host.accelerator, numbers.to(host.accelerator.device), -1), "agent_names": names}


def _log_rewards(host: Host, scored: ScoredRollout) -> None:
    """Log what TRL logs of rewards, and of each of several agents its turns and rewards."""
    logged, totals, credit = host.metrics, scored.totals(), host.method.credit
    _, std = (credit if isinstance(credit, GroupMean) else GroupMean()).of_outcomes(scored)
    for name, rewards in zip(scored.reward_names, scored.rewards_per_func.unbind(1), strict=True):
        logged[f"rewards/{name}/mean"].append(rewards.nanmean().item())
        logged[f"rewards/{name}/std"].append(nanstd(rewards).item())
    logged["reward"].append(totals.nanmean().item())
    logged["reward_std"].append(nanstd(totals).item())
    logged["frac_reward_zero_std"].append(torch.isclose(std, torch.zeros_like(std)).float().mean().item())
    if scored.agents is None or len(scored.agent_names) < 2:
        return
    for number, name in enumerate(scored.agent_names):
        own = scored.agents == number
        logged[f"agents/{name}/turn_share"].append((own.sum() / scored.turns.counts.sum()).item())
        logged[f"agents/{name}/reward"].append(totals[own.any(1)].nanmean().item())


def _log_pending_metrics(host: Host) -> None:
    """Log the means over all processes of what `_log_metric` recorded, in an order that all share."""
    pending = host.taken("metrics")
    for name in sorted({*gather_object(list(pending))}):
        host.log_mean(name, torch.tensor(pending.get(name, []), dtype=torch.float64))


def state_keys(trajectories: Sequence[Trajectory], num_turns: int) -> Tensor:
    """(B, K) int64, a number in [0, 2⁶³) for the state in which each turn starts, 0 where there is no turn.

    The state is the last observation, as in GiGPO (arXiv 2505.10978), or the prompt for the first turn. For a later
    turn without an observation before it, the state is everything that the policy read. What a context repeats is not
    an observation. The numbers depend only on tokens, so ranks can compare theirs.
    """
    keys = [[*_keys(row), *[0] * num_turns][:num_turns] for row in trajectories]
    return torch.tensor(keys, dtype=torch.long).view(len(trajectories), num_turns)


def _keys(trajectory: Trajectory) -> list[int]:
    keys, heard_from = [], 0
    for turn, (start, end) in enumerate(trajectory.spans):
        observed = trajectory.shown(heard_from, start)
        is_all = turn == 0 or not observed
        keys.append(_key(trajectory.read_before(start) if is_all else observed, is_all))
        heard_from = end
    return keys


def _key(ids: Sequence[int], is_all: bool) -> int:
    """A number for token ids. Python's own `hash` differs between processes for some types."""
    tokens = array("q", [int(is_all), *map(int, ids)])
    return int.from_bytes(blake2b(tokens.tobytes(), digest_size=8).digest(), "little") >> 1
