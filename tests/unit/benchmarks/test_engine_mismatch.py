"""What the benchmark of engine mismatch counts, and its tables; the engine itself needs vLLM (docs/vllm.md)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.engine_mismatch import Correction, Replayed, count
from benchmarks.mismatch_report import write_report


def batch(weights: list[list[float]], kept: list[list[int]]) -> dict[str, Any]:
    """Two trajectories: a turn of two tokens, an observation and a turn of one; and a turn of two."""
    return {
        "importance_sampling_ratio": torch.tensor(weights),
        "completion_mask": torch.ones(2, 4, dtype=torch.long),
        "tool_mask": torch.tensor(kept),
        "turn_ids": torch.tensor([[0, 0, -1, 1], [0, 0, -1, -1]]),
    }


EVERYTHING = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0]]).bool()


class TestCount:
    def test_all_kept(self) -> None:
        found = count(batch([[1.0] * 4] * 2, EVERYTHING.long().tolist()), EVERYTHING)
        assert found["tokens_kept"] == found["trajectories_whole"] == found["effective_share"] == 1.0
        assert (found["turns"], found["trajectories_gone"]) == (3, 0.0)

    def test_dropped_and_weighted(self) -> None:
        """The last turn of the first is masked, and the second weighs nothing."""
        found = count(batch([[1.0, 3.0, 1.0, 1.0], [0.0] * 4], [[1, 1, 0, 0], [1, 1, 0, 0]]), EVERYTHING)
        assert found["tokens_kept"] == pytest.approx(2 / 5)
        assert found["kept_by_trajectory"] == [0.667, 0.0]
        assert (found["trajectories_whole"], found["trajectories_gone"], found["turns"]) == (0.0, 0.5, 1)
        assert (found["weight_mean"], found["weight_min"], found["weight_max"]) == (2.0, 1.0, 3.0)
        assert found["effective_share"] == pytest.approx((1 + 3) ** 2 / (1 + 9) / 5)

    def test_one_weight_per_trajectory(self) -> None:
        """TRL's modes of sequences."""
        found = count(batch([[0.0], [2.0]], EVERYTHING.long().tolist()), EVERYTHING)
        assert found["kept_by_trajectory"] == [0.0, 1.0]

    def test_nothing_kept(self) -> None:
        found = count(batch([[0.0] * 4] * 2, EVERYTHING.long().tolist()), EVERYTHING)
        assert (found["tokens_kept"], found["effective_share"], found["weight_mean"]) == (0.0, 0.0, None)


def test_the_same_trajectories_are_given_again_until_they_are_forgotten() -> None:
    asked: list[int] = []
    rollout = Replayed(lambda prompts, trainer: asked.append(len(prompts)) or {"ids": [[len(asked)]]})
    first = rollout(["a"], None)
    first["ids"][0].append(9)
    assert rollout(["a"], None) == {"ids": [[1]]} and len(asked) == 1
    rollout.forget()
    assert rollout(["a"], None) == {"ids": [[2]]}


def setting(engine: str, kept: float) -> dict[str, Any]:
    correction = vars(Correction("turn_mask, 0.8–1.2", "turn_mask", 0.8, 1.2))
    counted = {
        "tokens_kept": kept,
        "trajectories_gone": 0.25,
        "effective_share": 0.125,
        "kept_by_trajectory": [kept, 1.0],
    }
    return {
        "world": "turns of 40 tokens",
        "engine": engine,
        "tokens": [90, 310],
        "turns": 5,
        "mean_difference": 0.01,
        "max_difference": 0.5,
        "max_turn_difference": 0.2,
        "sum_by_trajectory": [0.0, 2.0],
        "corrections": [{**correction, **counted}],
    }


def test_report(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    write_report({"seed": 7, "settings": [setting("float32", 1.0), setting("bfloat16", 0.5)]}, path)
    text = path.read_text()
    assert "| turns of 40 tokens | bfloat16 | 2 | 90–310, mean 200 | 0.01 | 0.5 | 1 | 0.2 |" in text
    assert "| turn_mask, 0.8–1.2 | 1.000 · 0.250 · 0.125 | 0.500 · 0.250 · 0.125 |" in text
    assert "| correction | 0–99 (1) | 300–399 (1) |" in text
    assert "| turn_mask, 0.8–1.2 | 0.500 | 1.000 |" in text
    assert "### float32\n\nEvery correction keeps every trajectory." in text
    assert "\n\n\n" not in text
