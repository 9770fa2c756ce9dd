"""What ranks gather, and which rows share a micro-batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_trl.trainers.batch import gather_rows, micro_batches


class Rank:
    """An accelerator whose rank has fewer columns than another, or as many; it keeps what is sent."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.sent: list[Tensor] = []

    def pad_across_processes(self, values: Tensor, dim: int, pad_index: int) -> Tensor:
        """As accelerate does it: a boolean plus a number is an integer."""
        if values.shape[dim] == self.most:
            return values
        padded = values.new_zeros((len(values), self.most)) + pad_index
        padded[:, : values.shape[dim]] = values
        return padded

    def gather(self, values: Tensor) -> Tensor:
        self.sent.append(values)
        return values


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64])
def test_every_rank_sends_one_type(dtype: Any) -> None:
    values = torch.ones(2, 3, dtype=dtype)
    ranks = Rank(3), Rank(5)
    whole, padded = (gather_rows(rank, values) for rank in ranks)  # type: ignore[arg-type]
    assert ranks[0].sent[0].dtype == ranks[1].sent[0].dtype
    assert whole.dtype == padded.dtype == dtype
    assert padded.tolist() == [[*row, *[0, 0]] for row in values.tolist()]


def batch_of(prompts: list[list[int]], lengths: list[int]) -> dict[str, Any]:
    """Rows of these prompts, whose completions have so many tokens."""
    completions = [[1] * length + [0] * (max(lengths) - length) for length in lengths]
    return {
        "prompt_ids": torch.tensor(prompts),
        "prompt_mask": torch.ones(len(prompts), len(prompts[0]), dtype=torch.long),
        "completion_mask": torch.tensor(completions),
        "row": [*range(len(lengths))],
        "num_items_in_batch": torch.tensor(sum(lengths)),
        "pixel_values": None,
    }


def rows(batch: dict[str, Any], **options: Any) -> list[list[int]]:
    given = {"count": 4, "of_step": 1, "shares": False, "processes": 1, **options}
    split = micro_batches(batch, **given)
    assert all(each["pixel_values"] is None and each["num_items_in_batch"] == sum(LENGTHS) for each in split)
    for each in split:
        assert each["completion_mask"].sum(1).tolist() == [LENGTHS[row] for row in each["row"]]
    return [each["row"] for each in split]


LENGTHS = [9, 1, 8, 2, 7, 3, 6, 4]


def test_rows_stay_in_their_order_in_one_process() -> None:
    assert rows(batch_of([[5]] * 8, LENGTHS)) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_processes_deal_rows_by_length() -> None:
    """The fullest micro-batches are as full as they can be, and in the same place on every process."""
    split = rows(batch_of([[5]] * 8, LENGTHS), processes=2)
    assert [[LENGTHS[row] for row in each] for each in split] == [[9, 1], [8, 2], [7, 3], [6, 4]]


def test_rows_of_one_prompt_are_put_together_within_an_update_alone() -> None:
    long = [[5] * 9, [6] * 9, [5] * 9, [6] * 9] * 2
    assert rows(batch_of(long, LENGTHS), of_step=2, shares=True) == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert rows(batch_of(long, LENGTHS), of_step=1, shares=True) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert rows(batch_of(long, LENGTHS), of_step=2, shares=False) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    short = [[5], [6]] * 4
    assert rows(batch_of(short, LENGTHS), of_step=2, shares=True) == [[0, 1], [2, 3], [4, 5], [6, 7]]
