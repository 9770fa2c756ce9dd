from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from sorl_trl.trainers.loss.micro_batch import ClipRange, clip_ranges
from sorl_trl.trainers.loss.turn_metrics import MetricSums, reduce_all, turn_metrics

from sorl_trl.ops import turn_layout

TURN_IDS = torch.tensor([[0, 0, -1, 1], [0, -1, -1, -1]])
LOG_RATIO = torch.tensor([[0.5, -0.1, float("nan"), -0.4], [0.0, 9.0, float("inf"), 0.0]])
ADVANTAGES = torch.tensor([[-1.0], [1.0]])


def reduce(log_ratio: torch.Tensor, turn_ids: torch.Tensor) -> dict[str, float]:
    turns = turn_layout(turn_ids)
    ranges = clip_ranges(ClipRange(0.2, 0.2), turns, "turn", "none")
    metrics = turn_metrics(log_ratio, turns, ADVANTAGES, ranges, "geometric")
    return metrics.reduce(Accelerator(cpu=True))


def test_hand_worked() -> None:
    metrics = reduce(LOG_RATIO, TURN_IDS)
    first, second = math.exp(0.2), math.exp(-0.4)  # of trajectory 0; trajectory 1 has one turn of ratio 1
    assert metrics["turns/per_trajectory"] == 1.5
    assert metrics["turns/length"] == pytest.approx(4 / 3)
    assert metrics["turns/ratio_mean"] == pytest.approx((first + second + 1) / 3)
    assert metrics["turns/ratio_min"] == pytest.approx(second)
    assert metrics["turns/ratio_max"] == pytest.approx(first)
    assert metrics["clip_fraction/token"] == pytest.approx(2 / 4)  # exp(0.5) and exp(-0.4)
    assert metrics["clip_fraction/turn"] == pytest.approx(2 / 3)
    assert metrics["clip_fraction/negative_turn"] == pytest.approx(1 / 2)  # only below 1 - ε counts
    kl = sum(math.exp(l) * l - math.exp(l) + 1 for l in (0.5, -0.1, -0.4)) / 3  # noqa: E741
    assert metrics["kl_to_old"] == pytest.approx(kl / 2)


def test_without_a_turn_there_is_nothing_to_average() -> None:
    metrics = reduce(LOG_RATIO, torch.full_like(TURN_IDS, -1))
    assert metrics["turns/per_trajectory"] == 0
    for name in ("turns/length", "turns/ratio_mean", "turns/ratio_min", "turns/ratio_max", "clip_fraction/token"):
        assert math.isnan(metrics[name]), name


def test_weights_of_all_micro_batches_make_one_sample_size() -> None:
    """It is said with the last; a mean of two sample sizes would be another number."""
    sums = [MetricSums(), MetricSums()]
    for each, weights in zip(sums, ([1.0, 1.0, 5.0], [4.0, 4.0, float("nan")]), strict=True):
        each.add_mean("mean", torch.tensor(weights), torch.tensor([1, 1, 0]))
        each.add_weights("size", torch.tensor(weights), torch.tensor([1, 1, 0]))
    first, last = reduce_all(sums, Accelerator(cpu=True))
    assert (first["mean"], last["mean"]) == (1.0, 4.0)
    assert math.isnan(first["size"])
    assert last["size"] == pytest.approx(10**2 / (4 * (1 + 1 + 16 + 16)))


def test_weights_of_all_ranks_make_one_sample_size() -> None:
    ranks = [MetricSums(), MetricSums()]
    for each, weights in zip(ranks, (torch.tensor([1.0, 1.0]), torch.tensor([4.0, 4.0, 2.0])), strict=True):
        each.add_mean("mean", weights, torch.ones_like(weights))
        each.add_weights("size", weights, torch.ones_like(weights))
    both: Any = SimpleNamespace(gather=lambda row: torch.cat([row, torch.stack([ranks[1].row()]).unsqueeze(0)]))
    metrics = ranks[0].reduce(both)
    assert metrics["mean"] == pytest.approx(12 / 5)
    assert metrics["size"] == pytest.approx(12**2 / (5 * (1 + 1 + 16 + 16 + 4)))
