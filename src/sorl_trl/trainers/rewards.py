"""Scores trajectories: their rewards, per trajectory or per turn, and what all processes know about them."""

from __future__ import annotations

import inspect
import math
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache, wraps
from hashlib import blake2b
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from trl.trainer.utils import is_async_callable, nanstd

from sorl_trl.methods import GroupMean, ScoredRollout
from sorl_trl.ops import differing_groups, group_spread, turn_layout
from sorl_trl.rollout.policy_rollout import ADDED_COLUMNS
from sorl_trl.trainers.batch import gather_rows, own_rows
from sorl_trl.trainers.host import Host
from sorl_trl.trainers.returned import padded
from sorl_trl.trainers.samples import Sample
from sorl_trl.types import Trajectory

SAMPLES = "_samples"
"""A parameter that a reward function may have, to get the `Sample` of each trajectory, with its tokens."""
TURN_IDS = "turn_ids"
"""A parameter that a reward function may have, to get the turn of each token, for each completion.
A dataset column of this name takes precedence."""
OF_TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""What TRL passes to every reward function besides columns."""
DEBUG_PAGE = "docs/how_to/debug.md"
_ALIKE = 3
"""After how many rollouts in a row without differing rewards to warn. Our choice."""


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


def scorable(host: Host, samples: Sequence[Sample], rewards_per_func: Tensor) -> Tensor:
    """All processes' (N, F) rewards, with NaN for trajectories that cannot be scored. Their shares are logged.

    A trajectory without policy tokens, for example because search was down, carries no information about the policy.
    An infinite reward would make the advantages of its whole group NaN.
    """
    own = torch.tensor([not each.trajectory.spans for each in samples], device=host.accelerator.device)
    without_turn = host.accelerator.gather(own)
    left_out = without_turn | rewards_per_func.isinf().any(1)
    rewards_per_func = torch.where(left_out.unsqueeze(1), torch.nan, rewards_per_func)
    unscored = rewards_per_func.isnan().all(1) & ~without_turn
    logged = host.metrics
    logged["trajectories_without_turn"].append(without_turn.float().mean().item())
    logged["trajectories_unscored"].append(unscored.float().mean().item())
    return rewards_per_func


def split_rewards(
    samples: Sequence[Sample], rewards_per_func: Tensor, weights: Tensor, num_turns: int
) -> dict[str, Tensor]:
    """The fields of a `ScoredRollout` for turn rewards and outcomes, each as the weighted sum over all functions.

    Args:
        samples: B trajectories, with their turn rewards.
        rewards_per_func: (B, F) of these trajectories, NaN where a function gave none.
        weights: (F,).
        num_turns: K.
    """
    table = rewards_per_func.new_full((len(samples), num_turns, len(weights)), torch.nan)
    outcomes = rewards_per_func.clone()
    for row, sample in enumerate(samples):
        if not sample.trajectory.spans:
            outcomes[row] = torch.nan
        for index, rewards in sample.turn_rewards.items():
            given = [math.nan if each is None else each for each in rewards]
            table[row, : len(given), index] = table.new_tensor(given)
            outcomes[row, index] = torch.nan
    return {
        "turn_rewards": (table * weights).nansum(-1),
        "has_turn_reward": ~table.isnan().all(-1),
        "outcomes": (outcomes * weights).nansum(-1),
    }


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


# -------------------------------------------------------------------------------------------------------------------
# The functions
# -------------------------------------------------------------------------------------------------------------------


def rewarding_turns(reward_func: Any, index: int, name: str) -> Any:
    """Wrap reward function number `index`, because TRL does not accept turn rewards. A reward model is returned as is.

    For each completion, the function may return a float (an outcome reward), a sequence with one float per turn (None
    for a turn that has none), or `None` (not scored by this function), in any mixture. NaN counts as `None`, as in
    TRL; a trajectory with an infinite reward is not scored at all. The floats per turn go into the sample's
    `turn_rewards`, and TRL gets their sum. A call without `SAMPLES`, as an overridden `_calculate_rewards` may make,
    reaches the function as it is.
    """
    if isinstance(reward_func, nn.Module):
        return reward_func
    takes_samples, takes_turns = (_takes(reward_func, each) for each in (SAMPLES, TURN_IDS))

    def given(arguments: dict[str, Any]) -> tuple[list[Sample] | None, dict[str, Any]]:
        samples: list[Sample] | None = arguments.pop(SAMPLES, None)
        if samples is None:
            return None, arguments
        own: dict[str, Any] = {SAMPLES: samples} if takes_samples else {}
        if takes_turns:
            own[TURN_IDS] = [[*each.trajectory.turn_ids] for each in samples]
        check_needed(reward_func, name, {**own, **arguments})
        return samples, {**own, **arguments}

    async def rewards_async(*positional: Any, **arguments: Any) -> Any:
        samples, arguments = given(arguments)
        returned = await reward_func(*positional, **arguments)
        return returned if samples is None else _recorded(returned, samples, index, name)

    def rewards(*positional: Any, **arguments: Any) -> Any:
        samples, arguments = given(arguments)
        returned = reward_func(*positional, **arguments)
        return returned if samples is None else _recorded(returned, samples, index, name)

    return wraps(reward_func, updated=())(rewards_async if is_async_callable(reward_func) else rewards)


def _recorded(returned: Iterable[Any], samples: Sequence[Sample], index: int, name: str) -> list[Any]:
    """Record the turn rewards of one function, and return one number (or `None`) per completion for TRL."""
    if not isinstance(returned, Iterable):
        raise ValueError(
            f"The reward function {name!r} returned {returned!r}, but must return a list with one reward for each of "
            f"{len(samples)} completions."
        )
    rewards = list(returned)
    if len(rewards) != len(samples):
        return rewards  # TRL raises, and names the function and both counts
    return [_record(reward, samples[row], row, index, name) for row, reward in enumerate(rewards)]


def _record(reward: Any, sample: Sample, row: int, index: int, name: str) -> Any:
    reward = reward.tolist() if hasattr(reward, "tolist") else reward  # tensors and arrays
    if not sample.trajectory.spans and reward is None:
        return 0.0  # masked out in any case; for None, TRL would print all that the function was given
    if reward is None or _is_number(reward):
        return reward
    is_list = isinstance(reward, Sequence) and not isinstance(reward, (str, bytes))
    if not (is_list and all(each is None or _is_number(each) for each in reward)):
        raise ValueError(
            f"The reward function {name!r} returned {reward!r} for trajectory {row}. A reward is a number, a list "
            "with one number per turn, or None."
        )
    count = len(sample.trajectory.spans)
    if count == 0:
        return None  # masked out of the loss, even if the function saw generated turns
    if len(reward) != count:
        raise ValueError(
            f"The reward function {name!r} returned {len(reward)} turn rewards for trajectory {row}, which has "
            f"{count} turns (as in `turn_ids`). Return one float per turn, one for the trajectory, or None."
        )
    turn_rewards = [None if each is None or math.isnan(each) else float(each) for each in reward]
    given = [each for each in turn_rewards if each is not None]
    if not given:
        return None
    if torch.tensor(given).isinf().any():
        return math.inf  # leaves the trajectory out
    sample.turn_rewards[index] = turn_rewards
    return math.fsum(given)


def check_needed(reward_func: Callable[..., Any], name: str, columns: Collection[str]) -> None:
    """Raise ValueError if a reward function needs an argument that is neither among `columns` nor given by TRL."""
    always = {*OF_TRL, "environments", SAMPLES, TURN_IDS}
    try:
        parameters = inspect.signature(reward_func).parameters.values()
    except (TypeError, ValueError):  # for example, a function in C
        return
    needed = [each.name for each in parameters if each.default is each.empty and each.kind in _BY_NAME]
    if absent := [each for each in needed if each not in {*columns} | always]:
        raise ValueError(
            f"The reward function {name!r} needs `{absent[0]}`, but the columns are "
            f"{sorted({*columns} - {*always, *ADDED_COLUMNS})}: rename the argument or the column, or give the "
            "argument a default."
        )


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _takes(reward_func: Callable[..., Any], parameter: str) -> bool:
    try:
        return parameter in inspect.signature(reward_func).parameters
    except (TypeError, ValueError):  # for example, a function in C
        return False


def _is_number(reward: Any) -> bool:
    """Whether TRL accepts it as a number; a string of digits is not one."""
    return hasattr(reward, "__float__")


# -------------------------------------------------------------------------------------------------------------------
# What is learnt from them
# -------------------------------------------------------------------------------------------------------------------


class RewardWatch:
    """Warns of rollouts that leave nothing to learn from, once for each cause.

    Args:
        warn: Called with the warnings.
        by_group: Whether the rewards of a group are compared, as without a critic, or those of all trajectories.
    """

    def __init__(self, warn: Callable[[str], None], by_group: bool) -> None:
        self._warn, self._by_group = cache(warn), by_group
        self._alike = 0
        """How many of the last rollouts had no differing rewards."""

    def observe(self, rollout: ScoredRollout) -> None:
        compared = rollout.num_generations if self._by_group else len(rollout.rewards_per_func)
        differ = differing_groups(group_spread(rollout.totals(), compared)).any()
        self._alike = 0 if differ else self._alike + 1
        if not rollout.turns.turn_mask.any():
            self._warn(
                "No trajectory of a rollout has a turn to train on: a search engine, tool, environment or agent "
                f"may be down. See `trajectories_without_turn` in {DEBUG_PAGE}."
            )
        elif self._alike >= _ALIKE:
            self._warn(
                f"No rewards differed in {_ALIKE} rollouts in a row, so there is hardly anything to learn. "
                f"See `frac_reward_zero_std` in {DEBUG_PAGE}."
            )


_NOTHING_ASKED: tuple[tuple[str, ...], Tensor] = ((), torch.zeros(0))


class HeldOut:
    """Compares each evaluation with the first one of the same questions."""

    def __init__(self) -> None:
        self._asked = _NOTHING_ASKED
        """The evaluation in progress: this process's prompts, and (questions,) mean rewards of all processes."""
        self._first: dict[tuple[str, ...], tuple[int, Tensor]] = {}
        """Step and rewards of the first evaluation, by the name of the set and its prompts."""

    def observe(self, samples: Sequence[Sample], rollout: ScoredRollout) -> None:
        prompts, rewards = self._asked
        own = rollout.totals().view(-1, rollout.num_generations).nanmean(1).double().cpu()
        self._asked = (*prompts, *(str(each.row["prompt"]) for each in samples)), torch.cat([rewards, own])

    def compare(self, name: str, step: int) -> str:
        """End an evaluation. Returns a line with both means and their difference, or "" if it is the first.

        The interval is 1.96 standard errors of the difference on either side, over questions with both rewards.
        """
        (prompts, after), self._asked = self._asked, _NOTHING_ASKED
        first, before = self._first.setdefault((name, *prompts), (step, after))
        pairs = torch.stack([before, after])[:, ~(before + after).isnan()]
        change, count = pairs[1] - pairs[0], pairs.size(1)
        if first == step or count < 2:
            return ""
        mean, error = change.mean().item(), 1.96 * change.std().item() / math.sqrt(count)
        means = " → ".join(f"{each.mean():.3f} (step {at})" for each, at in zip(pairs, (first, step), strict=True))
        title = f"Held-out reward{name and ' of '}{name.rstrip('_')}"
        within = f"95 % interval {mean - error:+.3f} to {mean + error:+.3f}"
        return f"{title}: {means}, {mean:+.3f} ({within}, {count} questions)"
