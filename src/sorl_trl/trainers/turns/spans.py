"""Where a completion's turns lie: as the rollout recorded them, or else at the runs of model tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sorl_trl.ops import turn_ids_from_mask, validate_turn_ids

RolloutOutput = dict[str, Any]


def checked_rollout(rollout_func: Callable[..., RolloutOutput]) -> Callable[..., RolloutOutput]:
    """Wrap `rollout_func` to check its output before TRL pads it: TRL silently fills a short mask with 1.

    If a rollout records `turn_ids` without an `env_mask`, the mask that they imply is added.
    """

    @wraps(rollout_func, updated=())  # so that the options of `rollout_func` can be checked
    def rollout(prompts: list[Any], trainer: Any) -> RolloutOutput:
        returned = rollout_func(prompts, trainer)
        # TRL reads None as a missing field, but requires the key `logprobs` in any case.
        output = {key: value for key, value in returned.items() if value is not None or key == "logprobs"}
        for key in ("env_mask", "turn_ids"):
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
    what = {"env_mask": "1 if it is the policy's, else 0", "turn_ids": "the index of its turn, or -1"}[key]
    raise ValueError(
        f"The rollout's `{key}` is {row!r:.200} in row {number}, but must hold an integer for each token: {what}. If "
        "the field means something else, give it another name."
    )


def check_rollout(output: RolloutOutput, num_prompts: int) -> None:
    """Raise a ValueError that names the row in which lengths, masks or turn ids of a rollout do not match."""
    completion_ids = output.get("completion_ids")
    if completion_ids is None:
        return  # TRL names the missing keys
    per_row = [key for key in ("prompt_ids", "completion_ids", "logprobs") if output.get(key) is not None]
    per_token = [key for key in ("logprobs", "env_mask", "turn_ids") if output.get(key) is not None]
    for key in {*per_row, *per_token}:
        if len(output[key]) != num_prompts:
            raise ValueError(f"The rollout returned {len(output[key])} rows of `{key}` for {num_prompts} prompts.")
    for row, ids in enumerate(completion_ids):
        if len(ids) == 0:
            raise ValueError(f"The rollout returned an empty completion in row {row}; it needs at least one token.")
        for key in per_token:
            if len(output[key][row]) != len(ids):
                raise ValueError(
                    f"The rollout returned {len(output[key][row])} entries of `{key}` in row {row}, whose completion "
                    f"has {len(ids)} tokens."
                )
    for row, mask in enumerate(output.get("env_mask", [])):
        if wrong := set(mask) - {0, 1}:
            raise ValueError(f"The rollout's `env_mask` holds {sorted(wrong)} in row {row}; only 0 and 1 are allowed.")
    if "turn_ids" in output:
        validate_turn_ids(padded(output["turn_ids"], -1), padded(output["env_mask"], 0))


def padded(rows: Sequence[Sequence[int]], value: int) -> Tensor:
    """(B, T) int64 of rows of different lengths, filled up on the right."""
    return pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True, padding_value=value)


def turn_ids_of(
    completion_ids: Sequence[Sequence[int]],
    env_mask: Sequence[Sequence[int]] | None,
    recorded: Sequence[Sequence[int]] | None,
) -> Tensor:
    """(B, T) turn ids: as recorded, else the runs of 1s in `env_mask`, else one turn per completion.

    Raises ValueError if tools have lengthened a completion whose turns `rollout_func` had recorded.
    """
    mask = padded(env_mask if env_mask is not None else [[1] * len(ids) for ids in completion_ids], 0)
    if recorded is None:
        return turn_ids_from_mask(mask)
    turn_ids = padded(recorded, -1)
    validate_turn_ids(turn_ids, mask)
    return turn_ids
