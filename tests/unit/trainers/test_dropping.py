"""What is dropped leaves masks, turns and denominators."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from sorl_trl.trainers.turns.dropping import drop

TURN_IDS = torch.tensor([[0, 0, -1, 1, 2], [0, -1, 1, 1, -1], [-1, -1, -1, -1, -1], [0, 0, 0, 0, -1]])


@pytest.fixture
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


def batch() -> dict[str, Any]:
    """Four trajectories, the third of which has no token: its search was down."""
    completion_mask = torch.tensor([[1] * 5, [1, 1, 1, 1, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 0]])
    return {
        "completion_mask": completion_mask,
        "tool_mask": torch.where(TURN_IDS >= 0, 1, 1 - completion_mask),
        "turn_ids": TURN_IDS,
        "num_items_in_batch": (TURN_IDS >= 0).sum(),
        "advantages": torch.arange(4.0),
    }


def dropped(keep: Tensor, accelerator: Accelerator, **changes: Any) -> dict[str, Any]:
    output = {**batch(), **changes}
    drop(output, keep, accelerator)
    return output


def test_a_row_leaves_masks_turns_and_denominators(accelerator: Accelerator) -> None:
    output = dropped(torch.tensor([True, True, True, False]), accelerator)
    assert torch.equal(output["turn_ids"][:3], TURN_IDS[:3])
    assert (output["turn_ids"][3] == -1).all()
    assert torch.equal((output["completion_mask"] * output["tool_mask"]).bool(), output["turn_ids"] >= 0)
    assert output["num_items_in_batch"] == 4 + 3
    # Three rows are left: the one whose search was down still counts as 0.
    assert output["row_scale"] == pytest.approx(4 / 3)
    assert output["row_scale"].dim() == 0


def test_a_row_without_a_token_is_not_dropped_again(accelerator: Accelerator) -> None:
    keep = torch.tensor([True, True, False, True])
    output = dropped(keep, accelerator)
    assert "row_scale" not in output
    assert output["num_items_in_batch"] == batch()["num_items_in_batch"]


def test_nothing_dropped_changes_nothing(accelerator: Accelerator) -> None:
    output = dropped(torch.ones(4, dtype=torch.bool), accelerator)
    assert output.keys() == batch().keys()
    assert all(torch.equal(output[key], value) for key, value in batch().items())


def test_a_mask_is_made_where_trl_has_none(accelerator: Accelerator) -> None:
    output = batch()
    output["completion_mask"] = (TURN_IDS >= 0).long()
    del output["tool_mask"]
    drop(output, torch.tensor([False, True, True, True]), accelerator)
    assert torch.equal((output["completion_mask"] * output["tool_mask"]).bool(), output["turn_ids"] >= 0)
    assert output["completion_mask"][0].any()  # attention sees what it saw


def test_turns_that_are_left_are_numbered_anew(accelerator: Accelerator) -> None:
    output = dropped(TURN_IDS != 1, accelerator)
    assert output["turn_ids"].tolist() == [
        [0, 0, -1, -1, 1],
        [0, -1, -1, -1, -1],
        [-1, -1, -1, -1, -1],
        [0, 0, 0, 0, -1],
    ]
    assert output["num_items_in_batch"] == 3 + 1 + 4
    assert output["row_scale"] == 1.0  # no trajectory has lost all it had


def test_a_trajectory_that_loses_its_only_turn_leaves(accelerator: Accelerator) -> None:
    output = dropped(TURN_IDS != 0, accelerator)
    assert output["turn_ids"].amax(1).tolist() == [1, 0, -1, -1]
    assert output["row_scale"] == pytest.approx(4 / 3)


def test_drops_add_up(accelerator: Accelerator) -> None:
    first, second = torch.tensor([False, True, True, True]), torch.tensor([False, True, True, False])
    output = dropped(first, accelerator)
    drop(output, second, accelerator)
    at_once = dropped(second, accelerator)
    assert output["row_scale"] == at_once["row_scale"] == pytest.approx(2.0)
    assert output["num_items_in_batch"] == at_once["num_items_in_batch"]
    assert torch.equal(output["turn_ids"], at_once["turn_ids"])


def test_everything_dropped_is_said(accelerator: Accelerator, caplog: pytest.LogCaptureFixture) -> None:
    output = dropped(torch.zeros(4, dtype=torch.bool), accelerator)
    assert output["num_items_in_batch"] == 0
    assert torch.isfinite(output["row_scale"])
    assert "learns nothing" in caplog.text


class OfTwoRanks(Accelerator):
    """Gathers what the other rank of two has said, too."""

    def __init__(self, other: Tensor) -> None:
        super().__init__(cpu=True)
        self.other = other

    def gather(self, tensor: Tensor) -> Tensor:
        return torch.cat([tensor, self.other])


def test_all_ranks_count_together() -> None:
    """The other rank drops two of its four trajectories, with 6 of its 10 tokens, and this rank none."""
    accelerator = OfTwoRanks(torch.tensor([[4, 2, 10, 4]]))
    output = dropped(torch.ones(4, dtype=torch.bool), accelerator)
    assert output["row_scale"] == pytest.approx(8 / 6)
    assert output["num_items_in_batch"] == int((TURN_IDS >= 0).sum()) + 4
