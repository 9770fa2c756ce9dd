from __future__ import annotations

import torch

from sorl_trl.ops import turn_layout
from sorl_trl.trainers.turns.recording import Generated
from sorl_trl.trainers.turns.spans import padded
from sorl_trl.trainers.turns.states import state_keys, turn_spans


def keys(*rows: tuple[list[int], list[int], list[int]]) -> list[list[int]]:
    """Of trajectories of prompt, completion and turn ids."""
    prompts, completions, turn_ids = (list(column) for column in zip(*rows, strict=True))
    return state_keys(Generated(prompts, completions, turn_ids), turn_layout(padded(turn_ids, -1))).tolist()


def test_spans_of_turns() -> None:
    assert turn_spans([-1, 0, 0, -1, 1, 2, -1]) == [(1, 3), (4, 5), (5, 6)]
    assert turn_spans([0, -1, 0, 1]) == [(0, 3), (3, 4)]  # interrupted by a token of the environment's
    assert turn_spans([-1, -1]) == []


def test_a_state_is_the_last_observation() -> None:
    """Whatever the policy had said before, and however long ago the observation was the first."""
    first = ([5], [7, 20, 21, 8], [0, -1, -1, 1])
    later = ([5], [9, 9, 20, 22, 9, 20, 21, 8], [0, 0, -1, -1, 1, -1, -1, 2])
    (_, of_first, _), (_, other, of_later) = keys(first, later)
    assert of_first == of_later != other


def test_the_first_turn_starts_in_the_prompt() -> None:
    """With what the environment has said before it, and it is no observation of the same tokens."""
    [[one], [same], [greeted], [other]] = keys(
        ([5, 6], [7], [0]), ([5, 6], [8], [0]), ([5, 6], [20, 8], [-1, 0]), ([6, 5], [7], [0])
    )
    assert one == same
    assert len({one, greeted, other}) == 3
    [[prompt, observation]] = keys(([20], [7, 20, 8], [0, -1, 1]))
    assert prompt != observation


def test_a_turn_that_follows_another_at_once_has_read_nothing_new() -> None:
    """Or all turns that tags split off would be in one state: that of no observation."""
    [[_, one], [_, other], [_, same]] = keys(([5], [7, 8], [0, 1]), ([5], [9, 8], [0, 1]), ([5], [7, 9], [0, 1]))
    assert one != other
    assert one == same


def test_keys_are_the_same_in_every_process() -> None:
    """And fit into int64."""
    many = [row[0] for row in keys(*(([i], [7], [0]) for i in range(200)))]
    assert len(set(many)) == 200
    assert min(many) >= 0
    assert max(many) > 2**61
    assert keys(([5], [7], [0])) == [[EXPECTED]]


EXPECTED = 5850268771259085613
"""Of another process."""


def test_without_a_turn() -> None:
    turns = turn_layout(torch.full((2, 3), -1))
    made = Generated([[5], [5]], [[1, 1, 1]] * 2, [[-1] * 3] * 2)
    assert state_keys(made, turns).shape == (2, 0)
    assert keys(([5], [20], [-1]), ([5], [7], [0]))[0] == [0]
