"""Said once, of a range that no ratio of a turn or sequence ever leaves."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from sorl_trl import SOGRPOConfig
from sorl_trl.ops import turn_layout
from sorl_trl.trainers.loss.metric_log import MetricLog
from sorl_trl.trainers.loss.micro_batch import ClipRange, MicroBatch, clip_ranges
from sorl_trl.trainers.loss.range_watch import UPDATES, RangeWatch

SAID = "nothing is clipped"
# Two turns of two tokens, whose ratios are 1 although those of their tokens are 1.5 and 2/3; and one that is 1.5.
WITHIN = torch.tensor([[0.405, -0.405, 0.405, -0.405]])
OUTSIDE = torch.tensor([[0.405, 0.405, 0.405, -0.405]])
STILL = torch.zeros(1, 4)
# All tokens of a trajectory by 2e-3: its KL is 2e-6 nats per token, and 0.2/4000 is less than it has moved.
ROUNDED = torch.full((1, 4), 2e-3)
NONE_TRAINED = torch.tensor([[-1, -1, -1, -1]])


class Run:
    """Updates that a watch sees, as many as asked, of two micro-batches each."""

    def __init__(self, tmp_path: Path, of_token: float = 0.2, **fields: Any) -> None:
        given = {"importance_sampling_level": "turn", "epsilon": 0.2, "loss_type": "grpo", "bf16": False, **fields}
        self.args = SOGRPOConfig(str(tmp_path), use_cpu=True, **given)
        self.of_token = ClipRange(of_token, of_token)
        metrics: dict[str, Any] = {"train": _Lists(), "eval": _Lists()}
        self.metric_log = MetricLog(self.args, Accelerator(cpu=True), metrics)
        self.watch = RangeWatch(self.args, self.metric_log)

    def begin(self, *log: dict[str, float]) -> Run:
        self.watch.on_train_begin(self.args, SimpleNamespace(log_history=list(log)), None)
        return self

    def update(self, *log_ratios: torch.Tensor, age: int | None = 1, turn_ids: Any = None, times: int = 1) -> Run:
        turns = turn_layout(torch.tensor([[0, 0, 1, 1]]) if turn_ids is None else turn_ids)
        level, scaling = self.args.importance_sampling_level, self.args.clip_range_scaling_in_use
        ranges = clip_ranges(self.of_token, turns, level, scaling)
        for _ in range(times):
            for i, log_ratio in enumerate(log_ratios):
                ends = i == len(log_ratios) - 1
                batch = MicroBatch(
                    log_ratio,
                    turns,
                    torch.ones(1, 1),
                    ranges,
                    {},
                    age is not None,
                    step=1,
                    age=age,
                    ends_step=ends,
                    has_own_surrogate=False,
                )
                self.metric_log.observe(batch)
                self.watch.observe(batch)
        return self


class _Lists(dict[str, list[float]]):
    def __missing__(self, name: str) -> list[float]:
        return self.setdefault(name, [])


@pytest.mark.parametrize("level", ["turn", "sequence"])
def test_it_is_said_once(tmp_path: Path, level: str, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, importance_sampling_level=level, clip_range_scaling="none").begin()
    with caplog.at_level(logging.WARNING):
        run.update(WITHIN, WITHIN, times=UPDATES - 1)
        assert SAID not in caplog.text
        run.update(WITHIN, WITHIN, times=3 * UPDATES)
    assert caplog.text.count(SAID) == 1
    assert f"100.0% of the token ratios were outside the clip range, and no {level} ratio ever was" in caplog.text
    assert "`epsilon=0.2`, `epsilon_high=0.2`" in caplog.text
    assert "Set `clip_range_scaling='sqrt_length'`" in caplog.text
    assert f"`clip_fraction/{level}` in the log" in caplog.text


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        (
            {"clip_range_scaling": "sqrt_length", "importance_sampling_level": "sequence"},
            "Set `clip_range_scaling='length'`",
        ),
        ({"clip_range_scaling": "length"}, "Lower `epsilon` and `epsilon_high` until"),
        ({"clip_range_scaling": "sqrt_length", "turn_ratio": "geometric"}, "Set `clip_range_scaling='length'`"),
    ],
    ids=str,
)
def test_what_to_set_is_narrower_than_what_is_set(
    tmp_path: Path, fields: dict[str, Any], advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, **fields).begin()
    run.update(WITHIN, times=UPDATES)
    assert advice in caplog.text


def test_the_arithmetic_mean_is_not_told_to_take_what_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, clip_range_scaling="sqrt_length", turn_ratio="arithmetic").begin()
    run.update(WITHIN, times=UPDATES)
    assert "Lower `epsilon` and `epsilon_high` until" in caplog.text


def test_only_updates_whose_ratios_may_differ_from_1_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path).begin()
    for _ in range(UPDATES - 1):
        run.update(STILL, age=0).update(WITHIN).update(WITHIN, age=None)
    run.update(WITHIN, turn_ids=NONE_TRAINED, times=UPDATES)
    run.update(STILL, age=0, times=UPDATES)
    assert SAID not in caplog.text
    run.update(WITHIN)
    assert SAID in caplog.text


@pytest.mark.parametrize("when", ["first", "between", "in one of its micro-batches"])
def test_one_unit_outside_is_enough_for_silence(tmp_path: Path, when: str, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path).begin()
    if when == "first":
        run.update(OUTSIDE)
    run.update(WITHIN, times=UPDATES // 2)
    if when == "between":
        run.update(OUTSIDE)
    if when.startswith("in one"):
        run.update(OUTSIDE, WITHIN)
    run.update(WITHIN, times=2 * UPDATES)
    assert SAID not in caplog.text


def test_a_policy_that_hardly_moves_is_no_matter_until_it_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path).begin()
    run.update(STILL, times=2 * UPDATES)
    assert SAID not in caplog.text
    run.update(WITHIN)
    assert "2.0% of the token ratios" in caplog.text


@pytest.mark.parametrize(
    "fields", [{"importance_sampling_level": "token"}, {"loss_type": "sapo"}, {"loss_type": "vespo"}], ids=str
)
def test_nothing_is_said_where_no_unit_is_clipped_anyway(
    tmp_path: Path, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    Run(tmp_path, **fields).begin().update(WITHIN, times=UPDATES)
    assert SAID not in caplog.text


@pytest.mark.parametrize(("before", "is_said"), [(0.0, True), (0.01, False), (math.nan, True)])
def test_a_resumed_run_knows_what_was_logged_before(
    tmp_path: Path, before: float, is_said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path).begin({"loss": 1.0}, {"clip_fraction/turn": before}, {"clip_fraction/turn": 0.0})
    run.update(WITHIN, times=UPDATES)
    assert (SAID in caplog.text) == is_said


NARROW_SAID = "narrower than what a policy moves that hardly moves"
NARROW = {"importance_sampling_level": "sequence", "clip_range_scaling": "none", "epsilon": 1e-3}


@pytest.mark.parametrize(
    ("scaling", "advice"),
    [
        ("length", "or set `clip_range_scaling='sqrt_length'`, until"),
        ("sqrt_length", "or set `clip_range_scaling='none'`, until"),
        ("none", "Raise `epsilon` and `epsilon_high`, until"),
    ],
)
def test_a_range_that_a_policy_leaves_without_moving(
    tmp_path: Path, scaling: str, advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, **NARROW | {"clip_range_scaling": scaling}, of_token=1e-3).begin()
    run.update(ROUNDED, age=0, times=2 * UPDATES).update(ROUNDED, times=UPDATES - 1)
    assert NARROW_SAID not in caplog.text
    run.update(ROUNDED, times=3 * UPDATES)
    assert caplog.text.count(NARROW_SAID) == 1
    assert "100.0% of the sequence ratios were outside the clip range" in caplog.text
    assert "was only 2e-06 nats per token" in caplog.text
    assert advice in caplog.text and "bf16" not in caplog.text


def test_what_half_precision_has_to_do_with_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Run(tmp_path, **NARROW, of_token=1e-3, bf16=True).begin().update(ROUNDED, times=UPDATES)
    assert "With `bf16=True` two forward passes of nearly the same weights differ by rounding" in caplog.text


def test_a_policy_that_moves_may_leave_its_range(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Run(tmp_path, **NARROW, of_token=1e-3).begin().update(OUTSIDE, times=2 * UPDATES)
    assert NARROW_SAID not in caplog.text


def test_half_of_the_units_is_not_most(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Run(tmp_path, **NARROW, of_token=1e-3).begin().update(ROUNDED, STILL, times=2 * UPDATES)
    assert NARROW_SAID not in caplog.text
