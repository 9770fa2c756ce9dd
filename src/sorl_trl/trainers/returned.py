"""Reads what a user's `rollout_func` or TRL's own generation returns as trajectories, and checks it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sorl_trl.ops import turn_ids_from_mask, validate_turn_ids
from sorl_trl.types import Action, ActionKind, Observation, StopReason, Trajectory, Turn

_REQUIRED = {"prompt_ids", "completion_ids", "logprobs"}
_MEANING = {
    "env_mask": "1 for the policy's tokens, else 0",
    "turn_ids": "the index of the token's turn, or -1",
    "context_ids": "the number of the token's context, negative where it repeats another context",
}
_PER_TOKEN = ("logprobs", *_MEANING)
_UNREAD = Action(ActionKind.MESSAGE)
"""The action of a turn of which only the tokens are known."""


def check_callable(rollout_func: Any) -> None:
    """Raise TypeError for what a call would not return a rollout of: a class, or an agent's coroutine function."""
    if inspect.isclass(rollout_func) or inspect.iscoroutinefunction(rollout_func):
        kind = "class" if inspect.isclass(rollout_func) else "coroutine function"
        raise TypeError(
            f"`rollout_func` is the {kind} {rollout_func.__name__!r}, but must be a function that returns a rollout. "
            "For an agent, it is `EndpointRollout(agent)`."
        )


def read_output(returned: Mapping[str, Any], num_prompts: int) -> list[Trajectory]:
    """The trajectories in a `rollout_func`'s output. Fields that TRL does not know become their columns.

    Turns are those that it records as `turn_ids`, or else one per run of 1s in the `env_mask`. A field that is no list
    belongs to all trajectories.

    Raises ValueError for missing keys, and for lengths, masks, turns, contexts or agents that do not match, with the
    row.
    """
    output = {key: value for key, value in returned.items() if value is not None or key == "logprobs"}
    if missing := sorted(_REQUIRED - output.keys()):
        raise ValueError(f"rollout_func must return keys {missing} in its output dict.")
    for key in _MEANING:
        if key in output:
            output[key] = [_integers(key, number, row) for number, row in enumerate(output[key])]
    if "turn_ids" in output:
        output.setdefault("env_mask", [[int(turn >= 0) for turn in row] for row in output["turn_ids"]])
    _check_lengths(output, num_prompts)
    prompt_ids, completion_ids, logprobs = (output.pop(key) for key in ("prompt_ids", "completion_ids", "logprobs"))
    masks = output.pop("env_mask", None) or [[1] * len(ids) for ids in completion_ids]
    contexts = output.pop("context_ids", None) or [[0] * len(ids) for ids in completion_ids]
    turn_ids = output.pop("turn_ids", None) or turn_ids_from_mask(padded(masks, 0), padded(contexts, 0)).tolist()
    agents = _named(output["agents"], turn_ids) if "agents" in output else [None] * num_prompts
    logprobs = logprobs or [None] * num_prompts
    trajectories = []
    for i, row in enumerate(zip(completion_ids, turn_ids, contexts, logprobs, agents, strict=True)):
        columns = {name: value[i] if isinstance(value, list) else value for name, value in output.items()}
        prompt = tuple(map(int, prompt_ids[i]))
        trajectories.append(Trajectory(prompt, (*_segments(i, *row),), StopReason.ENVIRONMENT_DONE, columns))
    return trajectories


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


def _segments(
    row: int, ids: Any, turn_ids: Any, contexts: Any, logprobs: Any, agents: Any
) -> list[Turn | Observation]:
    """The segments of a completion, from lists with an entry per token, and the name of each turn's agent."""
    tokens = [*map(int, ids)]
    # vLLM gives None for a token that it could not score.
    known = None if logprobs is None else [float("nan") if each is None else float(each) for each in logprobs]
    segments: list[Turn | Observation] = []
    last, read = (-1, 0), {0}  # the last turn and its context; the contexts that have begun, 0 with the prompt
    for (turn, context), places in groupby(range(len(tokens)), key=lambda place: (turn_ids[place], contexts[place])):
        first, *rest = places
        own = slice(first, first + 1 + len(rest))
        if turn < 0:
            segments.append(Observation((*tokens[own],), "", context=abs(context), repeats=context < 0))
        else:
            _check_context(row, first, context, read)
            if turn == last[0] and context != last[1]:
                raise ValueError(
                    f"The rollout's `context_ids` are {last[1]} and {context} within turn {turn} of row {row}: a turn "
                    "must be sampled in one context."
                )
            named = {"agent": agents[turn] if agents else "", "context": context, "resumes": turn == last[0]}
            segments.append(Turn((*tokens[own],), "", _UNREAD, None if known is None else (*known[own],), **named))
            last = turn, context
        read.add(abs(context))
    return segments


def _check_context(row: int, position: int, context: int, read: set[int]) -> None:
    """Raise ValueError if the policy cannot have sampled a token in a context, given those that have begun."""
    if context < 0 or context not in read:
        why = "repeats another context" if context < 0 else "is the first of its context, with nothing before it"
        raise ValueError(
            f"The rollout's `context_ids` is {context} at token {position} of row {row}, which {why}, but `env_mask` "
            "is 1 there. It may be 1 only on tokens that the policy sampled in this context."
        )


def _check_lengths(output: Mapping[str, Any], num_prompts: int) -> None:
    """Raise a ValueError that names the row where a rollout's lengths, masks or turns do not match."""
    given = [key for key in ("prompt_ids", "completion_ids", *_PER_TOKEN) if output.get(key) is not None]
    for key in {*given, *(key for key, value in output.items() if isinstance(value, list))}:
        if len(output[key]) != num_prompts:
            raise ValueError(f"The rollout returned {len(output[key])} rows of `{key}` for {num_prompts} prompts.")
    for row, ids in enumerate(output["completion_ids"]):
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


def _named(agents: Any, turn_ids: Sequence[Sequence[int]]) -> list[list[str]]:
    """The agents of each row's turns. Raises ValueError unless there is one name for each, or None for a row."""
    given = agents if isinstance(agents, list) else [agents] * len(turn_ids)
    counts = [max(row) + 1 for row in turn_ids]
    for number, (names, count) in enumerate(zip(given, counts, strict=True)):
        is_list = isinstance(names, list | tuple) and [*map(type, names)] == [str] * count
        if names is not None and not is_list:
            raise ValueError(
                f"The rollout's `agents` is {names!r:.200} in row {number}, but must be a list with the name of an "
                f"agent for each of the row's {count} turns. If the field means something else, rename it."
            )
    return [[""] * count if names is None else [*names] for names, count in zip(given, counts, strict=True)]


def padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """(B, T) int64 from rows of different lengths, padded on the right."""
    return pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True, padding_value=value)
