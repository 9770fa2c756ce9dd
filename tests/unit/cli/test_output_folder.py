"""Whether a run may write where it is to write."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sorl_trl.cli.output_folder import _mistake

OF_THE_USER = (
    "notes.txt",
    "README.md",
    "checkpoint-best/model.safetensors",
    "evaluation/mine.csv",
    "data/train.jsonl",
)


def make(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def mistake(folder: Path, resume: Any = None) -> str | None:
    return _mistake(
        SimpleNamespace(config=SimpleNamespace(output_dir=str(folder), resume_from_checkpoint=resume, max_steps=20))
    )


@pytest.mark.parametrize("name", ["checkpoint-10/config.json", "recipe.yaml", "model.safetensors"])
def test_a_used_folder_is_refused_with_the_ways_out(tmp_path: Path, name: str) -> None:
    said = mistake(make(tmp_path, name))
    assert said is not None and f"{tmp_path}, which holds a run" in said
    assert ("--resume_from_checkpoint latest" in said) == name.startswith("checkpoint")


def test_a_run_goes_on_in_its_own_folder_only(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", "checkpoint-10/config.json")
    assert mistake(folder, resume=str(folder / "checkpoint-10")) is None
    said = mistake(folder, resume=str(folder / "checkpoint-20"))
    assert said is not None and "is at step 20, and `max_steps` is 20" in said
    said = mistake(folder, resume=str(tmp_path / "other" / "checkpoint-10"))
    assert said is not None and "which holds a run" in said


@pytest.mark.parametrize("names", [(), OF_THE_USER])
def test_a_folder_without_a_run_is_free(tmp_path: Path, names: tuple[str, ...]) -> None:
    assert mistake(make(tmp_path / "new", *names)) is None
