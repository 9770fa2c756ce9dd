"""What several processes must have in common with one: losses, metrics, weights, and a plain checkpoint."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.cases import Case, build_trainer

# Means over trajectories or of the whole step. Others are means over the tokens or turns of a micro-batch, and which
# trajectories share one differs between one process and two.
SAME_METRICS = (
    "loss",
    "grad_norm",
    "reward",
    "kl_to_old",
    "clip_penalty",
    "turns/per_trajectory",
    "clipping_bias_norm",
    "lr_factor",
    *(f"groups/{name}" for name in ("refilled", "refill_rounds", "left")),
    *(f"agents/{name}/{metric}" for name in ("planner", "checker") for metric in ("turn_share", "reward")),
)
# An adapter's steps are five times as long (`build_config`), and its two factors multiply rounding differences.
WEIGHT_TOLERANCE = {"full": 1e-5, "lora": 1e-4}


def train_alone(case: Case) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Logs and weights of a single process, which leaves the two processes' checkpoint alone."""
    trainer = build_trainer(replace(case, options={**case.options, "save_strategy": "no"}))
    trainer.train()
    return trainer.state.log_history, trainer.model.state_dict()


def assert_as_alone(case: Case, result: dict[str, Any], but_for: str = "") -> None:
    """The two processes' losses, metrics, one perhaps `but_for`, and weights are those of one process."""
    logs, weights = train_alone(case)
    for ours, alone in zip(result["logs"][:-1], logs[:-1], strict=True):
        for key in set(SAME_METRICS) - {but_for}:
            assert ours.get(key) == (pytest.approx(alone[key], abs=1e-4) if key in alone else None), key
    ours = torch.load(Path(case.folder) / "weights.pt")
    assert ours.keys() == weights.keys()
    tolerance = WEIGHT_TOLERANCE["lora" if case.lora else "full"]
    for name, weight in weights.items():  # ZeRO-3 makes float32 of any policy
        torch.testing.assert_close(
            ours[name].to(weight),
            weight,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    start = build_trainer(case)
    assert any((weights[name] - weight).abs().max() > 1e-3 for name, weight in start.model.state_dict().items())


def assert_loads_plainly(weights: Mapping[Path, Path]) -> None:
    """Transformers and PEFT load each checkpoint, and these are its weights."""
    script = Path(__file__).with_name("load_checkpoint.py")
    command = [sys.executable, str(script), *(str(path) for pair in weights.items() for path in pair)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
