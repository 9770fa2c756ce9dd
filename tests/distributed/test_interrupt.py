"""Ctrl-C while two processes train: one line, and none of them stays."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from sorl_trl.trainers.checkpoint import newest_whole
from tests.distributed.launch import CONFIGS
from tests.interrupts import interrupted, make_world, training_words


@pytest.mark.distributed
@pytest.mark.parametrize(("config", "times"), [("ddp_cpu", 1), ("ddp_cpu", 2), ("zero2_cpu", 1)])
def test_two_processes(config: str, times: int, tmp_path: Path) -> None:
    make_world(tmp_path)
    words = training_words(tmp_path, save_steps=1, save_total_limit=2, per_device_train_batch_size=4)
    words = ["--accelerate_config", str(CONFIGS / f"{config}.yaml"), *words]
    code, shown = interrupted(tmp_path, words, lambda: newest_whole(tmp_path / "out") is not None, times)
    assert code == 130
    assert "Traceback" not in shown and "death signal" not in shown
    if times == 1:
        assert shown.count("interrupted at step ") == 1
        assert "--resume_from_checkpoint" in shown.splitlines()[-1]
    left = [each for each in psutil.process_iter(["cmdline"]) if str(tmp_path / "out") in (each.info["cmdline"] or ())]
    assert not left
