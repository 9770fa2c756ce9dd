"""Rows of one batch in the places of rows of another."""

from __future__ import annotations

from typing import Any

import torch

from sorl_trl.trainers.turns.merging import merge

PAD = 9
FIRST: dict[str, Any] = {
    "prompt_ids": torch.tensor([[PAD, 1], [2, 3]]),
    "prompt_mask": torch.tensor([[0, 1], [1, 1]]),
    "completion_ids": torch.tensor([[4, 5, 6], [4, PAD, PAD]]),
    "completion_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
    "tool_mask": torch.tensor([[1, 0, 1], [1, 1, 1]]),
    "turn_ids": torch.tensor([[0, -1, 1], [0, -1, -1]]),
    "advantages": torch.tensor([0.5, -0.5]),
    "old_per_token_logps": torch.tensor([[-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0]]),
    "importance_sampling_ratio": torch.tensor([[2.0], [3.0]]),
    "num_items_in_batch": torch.tensor(3),
}
SECOND: dict[str, Any] = {
    "prompt_ids": torch.tensor([[7], [8]]),
    "prompt_mask": torch.tensor([[1], [1]]),
    "completion_ids": torch.tensor([[7, PAD], [8, 7]]),
    "completion_mask": torch.tensor([[1, 0], [1, 1]]),
    "turn_ids": torch.tensor([[0, -1], [0, 0]]),
    "advantages": torch.tensor([[0.25, 0.0], [-0.25, -0.25]]),
    "old_per_token_logps": torch.tensor([[-5.0, 0.0], [-6.0, -7.0]]),
    "importance_sampling_ratio": torch.tensor([[4.0], [5.0]]),
    "num_items_in_batch": torch.tensor(3),
}
EXPECTED = {
    "prompt_ids": [[PAD, 1], [PAD, 8]],
    "prompt_mask": [[0, 1], [0, 1]],
    "completion_ids": [[4, 5, 6], [8, 7, PAD]],
    "completion_mask": [[1, 1, 1], [1, 1, 0]],
    "tool_mask": [[1, 0, 1], [1, 1, 1]],
    "turn_ids": [[0, -1, 1], [0, 0, -1]],
    "advantages": [[0.5, 0.0, 0.5], [-0.25, -0.25, 0.0]],
    "old_per_token_logps": [[-1.0, -2.0, -3.0], [-6.0, -7.0, 0.0]],
    "importance_sampling_ratio": [[2.0], [5.0]],
    "num_items_in_batch": 3,
}


def merged(first: dict[str, Any], second: dict[str, Any], takes: list[bool]) -> dict[str, Any]:
    return {name: x.tolist() for name, x in merge(first, second, torch.tensor(takes), PAD).items()}


def test_prompts_are_padded_on_the_left_and_completions_on_the_right() -> None:
    assert merged(FIRST, SECOND, [False, True]) == EXPECTED


def test_whichever_is_the_wider() -> None:
    assert merged(SECOND, FIRST, [True, False]) == EXPECTED


def test_without_a_row_the_batch_says_the_same() -> None:
    found = merged(FIRST, {**FIRST, "advantages": torch.zeros(2)}, [False, False])
    assert found == {name: x.tolist() for name, x in FIRST.items()}


def test_nothing_is_written_to() -> None:
    before = {name: x.clone() for name, x in FIRST.items()}
    merge(FIRST, SECOND, torch.tensor([True, True]), PAD)
    assert all(torch.equal(FIRST[name], x) for name, x in before.items())
