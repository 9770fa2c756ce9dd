"""Numbers for the states in which turns start, so that turns of a group with equal states can be compared."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor

from sorl_trl.ops import TurnLayout
from sorl_trl.trainers.turns.spans import padded


@dataclass(frozen=True)
class Generated:
    """The token ids of B trajectories of one process, on the host."""

    prompt_ids: Sequence[Sequence[int]]
    completion_ids: Sequence[Sequence[int]]
    turn_ids: Sequence[Sequence[int]]
    """The turn of each token of a completion, -1 where a token is not the policy's."""


def turn_spans(turn_ids: Sequence[int]) -> list[tuple[int, int]]:
    """For each turn in a row of turn ids, the position of its first token, and the position after its last."""
    first: dict[int, int] = {}
    end: dict[int, int] = {}
    for position, turn in enumerate(turn_ids):
        if turn >= 0:
            first.setdefault(turn, position)
            end[turn] = position + 1
    return [(first[turn], end[turn]) for turn in sorted(first)]


def state_keys(generated: Generated, turns: TurnLayout) -> Tensor:
    """(B, K) int64, a number in [0, 2⁶³) for the state in which each turn starts, 0 where there is no turn.

    The state is the last observation, as in GiGPO (arXiv 2505.10978), or the prompt for the first turn. The state of a
    later turn without an observation before it is its whole context. The numbers depend only on tokens, so that ranks
    can compare theirs.
    """
    if turns.num_turns == 0:
        return torch.zeros_like(turns.turn_mask, dtype=torch.int64)
    columns = zip(generated.prompt_ids, generated.completion_ids, generated.turn_ids, strict=True)
    keys = [_keys(prompt, completion, turn_spans(turn_ids)) for prompt, completion, turn_ids in columns]
    return padded(keys, 0).to(turns.turn_ids.device)


def _keys(prompt: Sequence[int], completion: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[int]:
    keys, heard_from = [], 0
    for turn, (start, end) in enumerate(spans):
        is_all = turn == 0 or heard_from == start
        keys.append(_key([*prompt, *completion[:start]] if is_all else completion[heard_from:start], is_all))
        heard_from = end
    return keys


def _key(ids: Sequence[int], is_all: bool) -> int:
    """A number for token ids. Python's own `hash` of some types differs between processes."""
    tokens = array("q", [int(is_all), *map(int, ids)])
    return int.from_bytes(blake2b(tokens.tobytes(), digest_size=8).digest(), "little") >> 1
