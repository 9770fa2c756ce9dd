"""Ctrl-C while `sorl train` trains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sorl_trl.cli.main import main
from sorl_trl.records.resume_point import newest_whole
from tests.interrupts import interrupted, make_world, training_words


def test_one_line_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And what it says goes on."""
    make_world(tmp_path)
    words = ["--accelerate_config", "single_cpu", *training_words(tmp_path, save_steps=1, save_total_limit=2)]
    code, shown = interrupted(tmp_path, words, lambda: newest_whole(tmp_path / "out") is not None)
    assert code == 130
    assert "Traceback" not in shown and "Error" not in shown
    last = [line for line in shown.splitlines() if line][-1]
    assert last.startswith("interrupted at step ")
    said = last.split("`")[1].split()
    step = int(newest_whole(tmp_path / "out").name.rpartition("-")[2])
    assert main(["train", *words, *said, "--max_steps", str(step + 1), "--save_total_limit", "9"]) == 0
    assert (tmp_path / "out" / f"checkpoint-{step + 1}").is_dir()


def test_nothing_was_saved(tmp_path: Path) -> None:
    make_world(tmp_path)
    words = ["--accelerate_config", "single_cpu", *training_words(tmp_path, save_steps=100_000)]
    bar = tmp_path / "err.txt"  # it leaves steps out where they are fast
    code, shown = interrupted(
        tmp_path, words, lambda: bool(re.search(r"\| [1-9]\d*/100000", bar.read_text())), times=2
    )
    assert code == 130
    assert "Traceback" not in shown
    assert f"before a checkpoint was saved: remove {tmp_path / 'out'} to start anew" in shown


def test_before_the_first_step(tmp_path: Path) -> None:
    """Nothing of the run is left that would refuse the same command."""
    make_world(tmp_path)
    words = [
        "--accelerate_config",
        "single_cpu",
        *training_words(tmp_path, steps_per_generation=64, num_generations=64),
    ]
    code, shown = interrupted(tmp_path, words, (tmp_path / "out/recipe.yaml").is_file)
    assert code == 130
    assert "interrupted before the first step: the same command starts anew" in shown
    assert not (tmp_path / "out/recipe.yaml").exists()
