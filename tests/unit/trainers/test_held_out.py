"""The line that compares an evaluation with the first one, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sorl_trl.trainers.rewards import HeldOut

BEFORE = [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
AFTER = [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0], [1.0, 1.0], [float("nan")] * 2]
"""Two trajectories for each of five questions, of which the last one's are lost."""


@pytest.fixture
def held_out() -> HeldOut:
    return HeldOut()


def evaluate(held_out: HeldOut, rewards: list[list[float]], step: int, name: str = "", first: str = "q") -> str:
    """In two batches."""
    for batch in (slice(0, 2), slice(2, None)):
        totals = torch.tensor(rewards[batch]).flatten()
        scored: Any = SimpleNamespace(totals=lambda totals=totals: totals, num_generations=2)
        samples: Any = [SimpleNamespace(row={"prompt": f"{first}{row}"}) for row in range(len(totals))]
        held_out.observe(samples, scored)
    return held_out.compare(name, step)


def test_before_and_after_with_the_interval_of_their_difference(held_out: HeldOut) -> None:
    """The differences are 1, 0, 0, 0: a mean of .25 with a standard error of .25."""
    assert evaluate(held_out, BEFORE, step=0) == ""
    line = evaluate(held_out, AFTER, step=50)
    assert "0.500 (step 0) → 0.750 (step 50), +0.250 (95 % interval -0.240 to +0.740, 4 questions)" in line
    again = evaluate(held_out, BEFORE, step=80)
    assert "0.600 (step 0) → 0.600 (step 80), +0.000 (95 % interval +0.000 to +0.000, 5 questions)" in again


def test_only_the_same_questions_are_compared(held_out: HeldOut) -> None:
    assert evaluate(held_out, BEFORE, step=0) == ""
    assert evaluate(held_out, AFTER, step=50, name="other_") == "", "another set"
    assert evaluate(held_out, AFTER, step=50, first="p") == "", "other questions in its place"
    assert held_out.compare("train_", 50) == held_out.compare("train_", 60) == "", "what is logged was no evaluation"
    assert "other" in evaluate(held_out, AFTER, step=60, name="other_")
