"""A real run that is driven into collapse, and what the guard does about it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.collapses import ALARM, guarded, logged


def test_stops_and_saves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer, guard = guarded(tmp_path, "stop", save_strategy="steps", save_steps=100)
    trainer.train()
    assert re.search(rf"high_kl: by step {ALARM} `kl_to_old` is \d\.\d+", caplog.text)
    assert [alarm.step for alarm in guard.alarms] == list(logged(trainer, "guard/alarms")) == [ALARM]
    assert trainer.state.global_step == ALARM
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [f"checkpoint-{ALARM}"]
    assert "CollapseGuard stops training" in caplog.text
