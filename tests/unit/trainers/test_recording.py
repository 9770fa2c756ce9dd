"""What ranks gather: each must send the same type, whether or not it has to pad."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_trl.trainers.rollout import gather_rows


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
