"""The benchmark of what a critic costs: how it counts memory, and its ratios from measurements made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.critic_cost import BASELINES, VARIANTS, report, table
from benchmarks.live_bytes import LiveBytes

KIB = torch.float32.itemsize * 256
"""Bytes of 256 numbers."""


class TestLiveBytes:
    def test_the_peak_is_what_lived_at_once(self) -> None:
        weight = torch.zeros(256)
        with LiveBytes([weight]) as live:
            for _ in range(3):
                doubled = weight + weight
                del doubled
            assert (live.now, live.peak) == (KIB, 2 * KIB)
            kept = weight.repeat(4)
        assert (live.now, live.peak) == (5 * KIB, 5 * KIB)
        del kept
        assert live.now == KIB

    def test_views_and_changes_in_place_hold_nothing_more(self) -> None:
        with LiveBytes() as live:
            weight = torch.zeros(256)
            weight.add_(1).view(16, 16)[3:].t()
        assert live.peak == KIB

    def test_gradients_count(self) -> None:
        weight = torch.nn.Parameter(torch.zeros(256))
        with LiveBytes([weight]) as live:
            (3 * weight).sum().backward()
        assert weight.grad is not None
        assert live.now == 2 * KIB


def measured() -> dict[str, Any]:
    """Every cycle of SO-GRPO takes 2 s, half of it generation; every critic adds 1 s, and a half to the memory."""
    is_baseline = {name: name in BASELINES.values() for name in VARIANTS}
    seconds = {name: [2.0, 2.0] if is_baseline[name] else [3.0, 3.0] for name in VARIANTS}
    generation = {name: 1 / 2 if is_baseline[name] else 1 / 3 for name in VARIANTS}
    memory = {name: {"peak_mib": 10.0 if is_baseline[name] else 15.0} for name in VARIANTS}
    once = {name: [2.0, 2.0] if is_baseline[name] else [5.0, 5.0] for name in VARIANTS}
    return report(seconds, generation, memory, once)


@pytest.mark.parametrize("kind", BASELINES)
def test_ratios(kind: str) -> None:
    row = measured()[kind]
    names = ("time_ratio", "time_ratio_q25", "time_ratio_q75", "training_time_ratio", "memory_ratio")
    assert [row[name] for name in names] == pytest.approx([1.5, 1.5, 1.5, 2.0, 1.5])
    assert row["one_update_time_ratio"] == 2.5


def test_the_table_has_a_row_per_kind() -> None:
    text = table(measured())
    assert "| `adapter` | SO-GRPO, LoRA | 1.50 (1.50 to 1.50) | 2.00 | 50% | 2.50 | 1.50 |" in text
    assert all(f"| `{kind}` |" in text for kind in BASELINES)
