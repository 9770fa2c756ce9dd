"""The metrics of a micro-batch and of a critic, by hand, and how processes and micro-batches are put together."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from sorl_trl.methods import Clip, Experience, MicroBatch, Objective, Ratio
from sorl_trl.ops import turn_layout
from sorl_trl.trainers.metrics import MetricLog, MetricSums, UpdateKL, batch_metrics, reduce_all
from sorl_trl.trainers.so_ppo_trainer import critic_metrics

TURN_IDS = torch.tensor([[0, 0, -1, 1], [0, -1, -1, -1]])
LOG_RATIO = torch.tensor([[0.5, -0.1, math.nan, -0.4], [0.0, 9.0, math.inf, 0.0]], dtype=torch.float64)
ONE = Accelerator(cpu=True)


def micro_batch(turn_ids: torch.Tensor = TURN_IDS) -> MicroBatch:
    return MicroBatch(
        logps=LOG_RATIO,
        old_logps=torch.zeros_like(LOG_RATIO),
        sampling_logps=torch.zeros_like(LOG_RATIO),
        log_ratio=LOG_RATIO,
        turns=turn_layout(turn_ids),
        advantages=torch.tensor([[-1.0], [1.0]]),
        unit=Ratio("turn"),
        clip=Clip(0.2, by_length=False),
        age=1,
    )


def kish(ratios: list[float]) -> float:
    return sum(ratios) ** 2 / (len(ratios) * sum(ratio**2 for ratio in ratios))


def test_hand_worked() -> None:
    metrics = reduce_all([batch_metrics(micro_batch())], ONE)[0]
    first, second = math.exp(0.2), math.exp(-0.4)  # of trajectory 0; trajectory 1 has one turn of ratio 1
    kl = sum(math.exp(l) * l - math.exp(l) + 1 for l in (0.5, -0.1, -0.4)) / 3  # noqa: E741
    assert metrics == pytest.approx(
        {
            "turns/per_trajectory": 1.5,
            "turns/length": 4 / 3,
            "turns/ratio_mean": (first + second + 1) / 3,
            "turns/ratio_min": second,
            "turns/ratio_max": first,
            "clip_fraction/token": 2 / 4,  # exp(0.5) and exp(-0.4)
            "clip_fraction/turn": 2 / 3,
            "kl_to_old": kl / 2,
            "kl_moved": kl * 1.5**0.5 / 2,
            "kl_at_rest": math.nan,
            # of the 4 tokens, two of the first turn
            "effective_sample_size": (2 * first + second + 1) ** 2 / (4 * (2 * first**2 + second**2 + 1)),
        },
        nan_ok=True,
    )


def test_without_a_turn_there_is_nothing_to_average() -> None:
    metrics = reduce_all([batch_metrics(micro_batch(torch.full_like(TURN_IDS, -1)))], ONE)[0]
    assert metrics["turns/per_trajectory"] == 0
    for name in ("turns/length", "turns/ratio_mean", "turns/ratio_min", "turns/ratio_max", "clip_fraction/token"):
        assert math.isnan(metrics[name]), name


def test_the_kl_of_an_update_is_the_mean_over_its_trajectories() -> None:
    """Those that it has moved since, and the others, however they are split: KLs of k, k and 0, and a batch of none.

    Each trajectory counts with the root of its turns' mean length, here of one and a half tokens.
    """
    log: dict[str, list[float]] = defaultdict(list)
    host: Any = SimpleNamespace(args=SimpleNamespace(loss_type="turn"), accelerator=ONE, metrics=log)
    metrics, nothing = MetricLog(host), Objective(LOG_RATIO, torch.zeros_like(LOG_RATIO, dtype=torch.bool))
    both, nobody = micro_batch(), micro_batch(torch.full_like(TURN_IDS, -1))
    alone = micro_batch(torch.stack([TURN_IDS[0], nobody.turns.turn_ids[0]]))

    def update(*batches: MicroBatch) -> UpdateKL:
        waiting = [metrics.observe(replace(each, ends_step=False), nothing, {}) for each in batches[:-1]]
        assert all(math.isnan(kl) for each in waiting for kl in each)
        return metrics.observe(batches[-1], nothing, {})

    adjusted, _ = update(alone)
    k = adjusted / 1.5**0.5
    assert k > 0.05
    at_rest = replace(alone, age=0)
    assert update(alone, both, nobody, at_rest) == pytest.approx((2 / 3 * adjusted, adjusted))
    assert update(at_rest) == pytest.approx((math.nan, adjusted), nan_ok=True)
    assert all(map(math.isnan, update(nobody)))
    assert log["kl_to_old"] == pytest.approx([k, k, k / 2, math.nan, k, k, math.nan], nan_ok=True)


def test_a_micro_batch_without_an_agent_has_no_metrics_of_it() -> None:
    """An optimizer step may train on several rollouts, which have different agents."""
    first, second = MetricSums(), MetricSums()
    first.add("loss", torch.tensor(1.0))
    first.add("planner", torch.tensor(2.0))
    second.add("loss", torch.tensor(3.0))
    second.add("searcher", torch.tensor(4.0))
    found = reduce_all([first, second], ONE)
    assert [each["loss"] for each in found] == [1.0, 3.0]
    assert found[0]["planner"] == 2.0 and math.isnan(found[1]["planner"])
    assert found[1]["searcher"] == 4.0 and math.isnan(found[0]["searcher"])


def test_the_effective_sample_size_is_that_of_all_micro_batches_on_all_ranks() -> None:
    """Each alone has one of 1, with equal ratios; together they are unequal, and one has more tokens."""
    ranks = [[[1.0, 1.0], [2.0, 2.0]], [[3.0], [0.5, 0.5, 0.5]]]
    sums = [[MetricSums() for _ in rank] for rank in ranks]
    for rank, of_rank in zip(ranks, sums, strict=True):
        for ratios, each in zip(rank, of_rank, strict=True):
            each.add("tokens", torch.tensor(float(len(ratios))))
            each.add("share", torch.tensor([*ratios, math.nan]), torch.tensor([1] * len(ratios) + [0]), "share")
    other = torch.stack([torch.cat([*each.numbers.values()]) for each in sums[1]]).unsqueeze(0)
    both: Any = SimpleNamespace(gather=lambda rows: torch.cat([rows, other]))
    first, last = reduce_all(sums[0], both)
    assert first == {"tokens": 1.5}
    assert last == pytest.approx({"tokens": 2.5, "share": kish([1.0, 1.0, 2.0, 2.0, 3.0, 0.5, 0.5, 0.5])})


def test_ranks_are_put_together() -> None:
    """Means by how many there are, scalars of terms by rank, extremes by the more extreme."""
    ranks = [MetricSums(), MetricSums()]
    for each, values in zip(ranks, (torch.tensor([1.0, 1.0]), torch.tensor([4.0, 4.0, 2.0])), strict=True):
        keep = torch.ones_like(values)
        each.add("mean", values, keep)
        each.add("scalar", values.mean())
        each.add("least", values, keep, "min")
        each.add("most", values, keep, "max")
    other = torch.cat([*ranks[1].numbers.values()])
    both: Any = SimpleNamespace(gather=lambda row: torch.cat([row, other.view(1, 1, -1)]))
    assert reduce_all([ranks[0]], both)[0] == pytest.approx(
        {"mean": 12 / 5, "scalar": (1 + 10 / 3) / 2, "least": 1.0, "most": 4.0}
    )


# ---------------------------------------------------------------------------------------------------------------------
# The critic
# ---------------------------------------------------------------------------------------------------------------------

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1], [0] * 4]).bool()
VALUES = torch.tensor([[0.0, 2.0, 5.0, math.nan], [2.0, math.nan, 5.0, 1.0], [math.nan] * 4])
RETURNS = torch.tensor([[0.0, 3.0, 1.0, math.nan], [3.0, math.nan, 1.0, 5.0], [math.nan] * 4])
ADVANTAGES = torch.tensor([[1.0, 2.0, -1.0, math.nan], [3.0, math.nan, 1.0, 0.0], [math.nan] * 4])


def describe(
    values: Tensor = VALUES, returns: Tensor = RETURNS, advantages: Tensor = ADVANTAGES, mask: Tensor = MASK
) -> dict[str, float]:
    """With targets that nothing may read."""
    targets = torch.full_like(returns, math.nan)
    return critic_metrics(Experience(turn_layout(MASK.long() - 1), values, advantages, targets, returns, mask))


@pytest.mark.filterwarnings("error")
class TestCriticMetrics:
    def test_overall_by_hand(self) -> None:
        metrics = describe()
        # Returns 0, 3, 1, 3, 1, 5; residuals 0, 1, -4, 1, -4, 4: mean squares less squared means.
        spread, error = 45 / 6 - (13 / 6) ** 2, 50 / 6 - (2 / 6) ** 2
        assert metrics["critic/explained_variance"] == pytest.approx(1 - error / spread)
        assert metrics["critic/value_mean"] == pytest.approx(15 / 6)
        assert metrics["critic/return_mean"] == pytest.approx(13 / 6)
        assert metrics["advantages/mean"] == 1.0
        assert metrics["advantages/std"] == pytest.approx(math.sqrt(10 / 5))

    @pytest.mark.parametrize("shape", [(3, 4), (3, 0), (0, 4)])
    def test_no_unit(self, shape: tuple[int, int]) -> None:
        metrics = describe(*(torch.full(shape, math.nan),) * 3, torch.zeros(shape).bool())
        assert len(metrics) == 5
        assert all(math.isnan(value) for value in metrics.values())
