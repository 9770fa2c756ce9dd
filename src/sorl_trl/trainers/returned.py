"""Reads what a user's `rollout_func` or TRL's own generation returns as trajectories, and checks it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

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
"""Optional fields with an integer for each token of the completion."""
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


class _Tokens(NamedTuple):
    """A completion: parallel lists with an entry per token."""

    ids: list[int]
    env_mask: list[int]
    turn_ids: list[int]
    context_ids: list[int]
    logprobs: list[float] | None


def read_output(returned: Mapping[str, Any], num_prompts: int) -> list[Trajectory]:
    """The trajectories in a `rollout_func`'s output. Fields that TRL does not know become their columns.

    Turns are those that it records as `turn_ids`, or else one per run of 1s in the `env_mask`. A field that is no list
    belongs to all trajectories.

    Raises ValueError for missing keys, and for lengths, turns, contexts or agents that do not match, with the row.
    """
    output = {key: value for key, value in returned.items() if value is not None or key == "logprobs"}
    if missing := sorted(_REQUIRED - output.keys()):
        raise ValueError(f"rollout_func must return keys {missing} in its output dict.")
    for key, value in output.items():
        if (key in _REQUIRED or isinstance(value, list)) and value is not None and len(value) != num_prompts:
            raise ValueError(f"The rollout returned {len(value)} rows of `{key}` for {num_prompts} prompts.")
    rows = [
        {key: value[i] if key in _MEANING or isinstance(value, list) else value for key, value in output.items()}
        for i in range(num_prompts)
    ]
    prompts = [tuple(map(int, row.pop("prompt_ids"))) for row in rows]
    completions = [_tokens(number, row) for number, row in enumerate(rows)]
    validate_turn_ids(
        padded([each.turn_ids for each in completions], -1), padded([each.env_mask for each in completions], 0)
    )
    return [
        Trajectory(prompt, (*_segments(number, tokens, row.get("agents")),), StopReason.ENVIRONMENT_DONE, row)
        for number, (prompt, tokens, row) in enumerate(zip(prompts, completions, rows, strict=True))
    ]


def _tokens(number: int, row: dict[str, Any]) -> _Tokens:
    """Take the completion out of a row. Raises ValueError for no token, and for lists of other lengths."""
    ids, logprobs = [*map(int, row.pop("completion_ids"))], row.pop("logprobs")
    if not ids:
        raise ValueError(f"The rollout returned an empty completion in row {number}; it needs at least one token.")
    given = {key: _integers(key, number, row.pop(key)) for key in _MEANING if key in row}
    for key, values in {"logprobs": logprobs, **given}.items():
        if values is not None and len(values) != len(ids):
            raise ValueError(
                f"The rollout returned {len(values)} entries of `{key}` in row {number}, but its completion has "
                f"{len(ids)} tokens."
            )
    turn_ids, contexts = given.get("turn_ids"), given.get("context_ids", [0] * len(ids))
    mask = given.get("env_mask", [1] * len(ids) if turn_ids is None else [int(turn >= 0) for turn in turn_ids])
    if turn_ids is None:
        turn_ids = turn_ids_from_mask(torch.tensor([mask]), torch.tensor([contexts]))[0].tolist()
    # vLLM gives None for a token that it could not score.
    known = None if logprobs is None else [float("nan") if each is None else float(each) for each in logprobs]
    return _Tokens(ids, mask, turn_ids, contexts, known)


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


def _segments(number: int, tokens: _Tokens, agents: Any) -> Iterator[Turn | Observation]:
    """The segments of a completion. Raises ValueError unless `agents`, if any, has a name for each turn."""
    count = max(tokens.turn_ids) + 1
    names = [""] * count if agents is None else agents
    if not isinstance(names, list | tuple) or [*map(type, names)] != [str] * count:
        raise ValueError(
            f"The rollout's `agents` is {names!r:.200} in row {number}, but must be a list with the name of an agent "
            f"for each of the row's {count} turns. If the field means something else, rename it."
        )
    last, read = -1, {0}  # the last turn; the contexts that have begun, 0 with the prompt
    places = groupby(range(len(tokens.ids)), key=lambda place: (tokens.turn_ids[place], tokens.context_ids[place]))
    for (turn, context), found in places:
        first, *rest = found
        own = slice(first, first + 1 + len(rest))
        ids, logprobs = (*tokens.ids[own],), None if tokens.logprobs is None else (*tokens.logprobs[own],)
        if turn < 0:
            yield Observation(ids, "", context=abs(context), repeats=context < 0)
        elif context not in read:
            raise ValueError(
                f"The rollout's `context_ids` is {context} at token {first} of row {number}, but `env_mask` is 1 "
                "there: the policy can only have sampled it after other tokens of this context, and not where it "
                "repeats another (a negative number)."
            )
        else:
            yield Turn(ids, "", _UNREAD, logprobs, agent=names[turn], context=context, resumes=turn == last)
            last = turn
        read.add(abs(context))


def padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """(B, T) int64 from rows of different lengths, padded on the right."""
    return pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True, padding_value=value)
