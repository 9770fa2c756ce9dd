"""Ctrl-C while `sorl train` trains."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from sorl_trl.cli.train import launch
from sorl_trl.command_line import run_command
from sorl_trl.trainers.checkpoint import newest_whole
from tests.distributed.launch import CONFIGS
from tests.interrupts import interrupted, make_world, training_words

SINGLE = ["--accelerate_config", "single_cpu"]


def test_one_line_tells_how_to_continue(tmp_path: Path) -> None:
    """And its command continues the run."""
    make_world(tmp_path)
    words = [*SINGLE, *training_words(tmp_path, save_steps=1, save_total_limit=2)]
    code, shown = interrupted(tmp_path, words, lambda: newest_whole(tmp_path / "out") is not None)
    assert code == 130
    assert "Traceback" not in shown and "Error" not in shown
    last = [line for line in shown.splitlines() if line][-1]
    assert last.startswith("interrupted at step ")
    how = last.split("`")[1].split()
    step = int(newest_whole(tmp_path / "out").name.rpartition("-")[2])
    assert run_command(launch, [*words, *how, "--max_steps", str(step + 1), "--save_total_limit", "9"]) == 0
    assert (tmp_path / "out" / f"checkpoint-{step + 1}").is_dir()


def test_a_run_without_a_checkpoint_reports_it(tmp_path: Path) -> None:
    """And a second Ctrl-C ends it at once."""
    make_world(tmp_path)
    words = [*SINGLE, *training_words(tmp_path, save_steps=100_000)]
    code, shown = interrupted(tmp_path, words, (tmp_path / "out/recipe.yaml").is_file, times=2)
    assert code == 130
    assert "Traceback" not in shown
    assert "before a checkpoint was saved" in shown


@pytest.mark.distributed
@pytest.mark.parametrize(("config", "times"), [("ddp_cpu", 1), ("ddp_cpu", 2), ("zero2_cpu", 1)])
def test_of_two_processes_none_stays(config: str, times: int, tmp_path: Path) -> None:
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
