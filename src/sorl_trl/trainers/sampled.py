"""The trajectories of one process, token by token: checks of rollout output, and the context of each turn."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sorl_trl.ops import turn_ids_from_mask, validate_turn_ids

RolloutOutput = dict[str, Any]
PER_TOKEN = ("logprobs", "env_mask", "turn_ids", "context_ids")
_MEANING = {
    "env_mask": "1 for the policy's tokens, else 0",
    "turn_ids": "the index of the token's turn, or -1",
    "context_ids": "the number of the token's context, negative where it repeats another context",
}


@dataclass(eq=False, repr=False)
class Sampled:
    """One trajectory. Its lists have one entry per token of the completion, which concatenates the contexts.

    A context is what the policy read at once. Context 0 continues the prompt. Each other context was read afresh, for
    example a history without its earlier thoughts, and contains everything that was read.
    """

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    turn_ids: Sequence[int]
    """The turn of each token, -1 at tokens that are not the policy's."""
    context_ids: Sequence[int]
    """The context of each token, negative where a context repeats another."""
    turn_rewards: dict[int, list[float | None]] = field(default_factory=dict)
    """By reward function index, the reward of each turn. Functions that reward turns add to it."""
    agents: Sequence[str] = ()
    """The agent of each turn, "" if the rollout names none."""

    @cached_property
    def turns(self) -> list[tuple[int, int]]:
        """For each turn, the position of its first token and the position after its last."""
        first: dict[int, int] = {}
        end: dict[int, int] = {}
        for position, turn in enumerate(self.turn_ids):
            if turn >= 0:
                first.setdefault(turn, position)
                end[turn] = position + 1
        return [(first[turn], end[turn]) for turn in sorted(first)]

    def read_before(self, position: int) -> list[int]:
        """The tokens that the policy had read, in order, when it wrote the token at `position`."""
        context = abs(self.context_ids[position])
        before = zip(self.completion_ids[:position], self.context_ids[:position], strict=True)
        return [*([] if context else self.prompt_ids), *(token for token, own in before if abs(own) == context)]

    def shown(self, start: int, end: int) -> list[int]:
        """The tokens in a range without those that only repeat others."""
        tokens = zip(self.completion_ids[start:end], self.context_ids[start:end], strict=True)
        return [token for token, context in tokens if context >= 0]


# -------------------------------------------------------------------------------------------------------------------
# What a rollout function returns
# -------------------------------------------------------------------------------------------------------------------


def checked_rollout(rollout_func: Callable[..., RolloutOutput]) -> Callable[..., RolloutOutput]:
    """Wrap `rollout_func` to check its output before TRL pads it: TRL silently fills a short mask with 1.

    If a rollout records `turn_ids` without an `env_mask`, the implied mask is added.

    Raises TypeError for what a call would not return a rollout of: a class, or an agent's coroutine function.
    """
    if inspect.isclass(rollout_func) or inspect.iscoroutinefunction(rollout_func):
        kind = "class" if inspect.isclass(rollout_func) else "coroutine function"
        raise TypeError(
            f"`rollout_func` is the {kind} {rollout_func.__name__!r}, but must be a function that returns a rollout. "
            "For an agent, it is `EndpointRollout(agent)`."
        )

    @wraps(rollout_func, updated=())  # so that the options of `rollout_func` can be checked
    def rollout(prompts: list[Any], trainer: Any) -> RolloutOutput:
        returned = rollout_func(prompts, trainer)
        # TRL reads None as a missing field, but requires the key `logprobs` in any case.
        output = {key: value for key, value in returned.items() if value is not None or key == "logprobs"}
        for key in _MEANING:
            if key in output:
                output[key] = [_integers(key, number, row) for number, row in enumerate(output[key])]
        if "turn_ids" in output:
            output.setdefault("env_mask", [[int(turn >= 0) for turn in row] for row in output["turn_ids"]])
        check_rollout(output, len(prompts))
        return output

    return rollout


def _integers(key: str, number: int, row: Any) -> list[int]:
    """A row of integers, which may be a tensor. Raises ValueError for anything else."""
    try:
        values = [(value, int(value)) for value in row]
        if all(value == integer for value, integer in values):
            return [integer for _, integer in values]
    except (TypeError, ValueError, OverflowError):  # no finite numbers, or no sequence
        pass
    raise ValueError(
        f"The rollout's `{key}` is {row!r:.200} in row {number}, but must hold an integer for each token: "
        f"{_MEANING[key]}. If the field means something else, give it another name."
    )


def check_rollout(output: RolloutOutput, num_prompts: int) -> None:
    """Raise a ValueError that names the row where a rollout's lengths, masks, turns or contexts do not match."""
    completion_ids = output.get("completion_ids")
    if completion_ids is None:
        return  # TRL names the missing keys
    given = [key for key in ("prompt_ids", "completion_ids", *PER_TOKEN) if output.get(key) is not None]
    for key in {*given, *(key for key, value in output.items() if isinstance(value, list))}:
        if len(output[key]) != num_prompts:
            raise ValueError(f"The rollout returned {len(output[key])} rows of `{key}` for {num_prompts} prompts.")
    for row, ids in enumerate(completion_ids):
        if len(ids) == 0:
            raise ValueError(f"The rollout returned an empty completion in row {row}; it needs at least one token.")
        for key in given[given.index("completion_ids") + 1 :]:
            if len(output[key][row]) != len(ids):
                raise ValueError(
                    f"The rollout returned {len(output[key][row])} entries of `{key}` in row {row}, but its "
                    f"completion has {len(ids)} tokens."
                )
    for row, mask in enumerate(output.get("env_mask", [])):
        if wrong := set(mask) - {0, 1}:
            raise ValueError(f"The rollout's `env_mask` holds {sorted(wrong)} in row {row}; only 0 and 1 are allowed.")
    if "turn_ids" in output:
        validate_turn_ids(padded(output["turn_ids"], -1), padded(output["env_mask"], 0))
    for row, contexts in enumerate(output.get("context_ids", [])):
        mask = output["env_mask"][row] if "env_mask" in output else [1] * len(contexts)
        _check_contexts(row, contexts, mask, output["turn_ids"][row] if "turn_ids" in output else [])


def _check_contexts(row: int, contexts: Sequence[int], mask: Sequence[int], turn_ids: Sequence[int]) -> None:
    begun = {0}  # which the prompt begins
    for position, (context, is_policys) in enumerate(zip(contexts, mask, strict=True)):
        if is_policys and (context < 0 or context not in begun):
            why = "repeats another context" if context < 0 else "is the first of its context, with nothing before it"
            raise ValueError(
                f"The rollout's `context_ids` is {context} at token {position} of row {row}, which {why}, but "
                "`env_mask` is 1 there. It may be 1 only on tokens that the policy sampled in this context."
            )
        begun.add(abs(context))
    found: dict[int, int] = {}
    for context, turn in zip(contexts, turn_ids, strict=False):
        if turn >= 0 and found.setdefault(turn, context) != context:
            raise ValueError(
                f"The rollout's `context_ids` are {found[turn]} and {context} within turn {turn} of row {row}: a turn "
                "must be sampled in one context."
            )


def padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """(B, T) int64 from rows of different lengths, padded on the right."""
    return pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True, padding_value=value)


def sampled_rows(
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    env_mask: Sequence[Sequence[int]] | None,
    turn_ids: Sequence[Sequence[int]] | None,
    context_ids: Sequence[Sequence[int]] | None,
    window: int | None = None,
) -> list[Sampled]:
    """The trajectories of a rollout, with turns as recorded, or else one turn per run of 1s in the `env_mask`.

    Raises:
        ValueError: Tools lengthened a completion after `rollout_func` recorded its turns, or a context exceeds the
            `window` that the policy can read at once.
    """
    masks = [[1] * len(ids) for ids in completion_ids] if env_mask is None else env_mask
    contexts = [[0] * len(ids) for ids in completion_ids] if context_ids is None else context_ids
    if turn_ids is None:
        found = turn_ids_from_mask(padded(masks, 0), padded(contexts, 0)).tolist()
        turn_ids = [row[: len(ids)] for row, ids in zip(found, completion_ids, strict=True)]
    else:
        validate_turn_ids(padded(turn_ids, -1), padded(masks, 0))
    rows = [Sampled(*row) for row in zip(prompt_ids, completion_ids, turn_ids, contexts, strict=True)]
    if context_ids is not None and window is not None:
        for number, row in enumerate(rows):
            _check_window(number, row, window)
    return rows


def name_agents(rows: Sequence[Sampled], agents: Any) -> None:
    """Record a rollout's `agents`, if any. Raises ValueError unless there is one name for each turn of each row."""
    given = agents if isinstance(agents, list) else [agents] * len(rows)
    for number, (row, names) in enumerate(zip(rows, given, strict=True)):
        names = [""] * len(row.turns) if names is None else names
        if not isinstance(names, list | tuple) or [*map(type, names)] != [str] * len(row.turns):
            raise ValueError(
                f"The rollout's `agents` is {names!r:.200} in row {number}, but must be a list with the name of an "
                f"agent for each of the row's {len(row.turns)} turns. If the field means something else, rename it."
            )
        row.agents = names


def _check_window(number: int, row: Sampled, window: int) -> None:
    lengths = {0: len(row.prompt_ids)}
    for context in map(abs, row.context_ids):
        lengths[context] = lengths.get(context, 0) + 1
    context, longest = max(lengths.items(), key=lambda item: item[1])
    if longest > window:
        raise ValueError(
            f"The rollout's context {context} of row {number} has {longest} tokens, but the policy can read at most "
            f"{window}."
        )


# -------------------------------------------------------------------------------------------------------------------
# States
# -------------------------------------------------------------------------------------------------------------------


def state_keys(rows: Sequence[Sampled], num_turns: int) -> Tensor:
    """(B, K) int64, a number in [0, 2⁶³) for the state in which each turn starts, 0 where there is no turn.

    The state is the last observation, as in GiGPO (arXiv 2505.10978), or the prompt for the first turn. For a later
    turn without an observation before it, the state is everything that the policy read. What a context repeats is not
    an observation. The numbers depend only on tokens, so ranks can compare theirs.
    """
    keys = [[*_keys(row), *[0] * num_turns][:num_turns] for row in rows]
    return torch.tensor(keys, dtype=torch.long).view(len(rows), num_turns)


def _keys(row: Sampled) -> list[int]:
    keys, heard_from = [], 0
    for turn, (start, end) in enumerate(row.turns):
        observed = row.shown(heard_from, start)
        is_all = turn == 0 or not observed
        keys.append(_key(row.read_before(start) if is_all else observed, is_all))
        heard_from = end
    return keys


def _key(ids: Sequence[int], is_all: bool) -> int:
    """A number for token ids. Python's own `hash` differs between processes for some types."""
    tokens = array("q", [int(is_all), *map(int, ids)])
    return int.from_bytes(blake2b(tokens.tobytes(), digest_size=8).digest(), "little") >> 1
