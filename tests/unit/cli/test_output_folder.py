"""Whether a run may write where it is to write, and what is removed for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sorl_trl.cli.output_folder import _mistake, clear_output_folder

OF_A_RUN = (
    *("checkpoint-10/model.safetensors", "model.safetensors", "model-00001-of-00002.safetensors", "config.json"),
    *("recipe.yaml", "trainer_state.json", "tokenizer.json", "critic/value_head.safetensors"),
    *("evaluation/settings.json", "evaluation/trajectories/eval/000000.parquet", "evaluation/results.md"),
    "trajectories/step_00000001_rank_0000.parquet",
)
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


def mistake(folder: Path, resume: Any = None, overwrite: bool = False, model: str = "elsewhere") -> str | None:
    return _mistake(
        SimpleNamespace(
            config=SimpleNamespace(output_dir=str(folder), resume_from_checkpoint=resume, max_steps=20),
            trainer=SimpleNamespace(overwrite_output_dir=overwrite),
            model=SimpleNamespace(model_name_or_path=model),
        )
    )


@pytest.mark.parametrize("name", ["checkpoint-10/config.json", "recipe.yaml", "model.safetensors"])
def test_a_used_folder_is_refused_with_the_ways_out(tmp_path: Path, name: str) -> None:
    said = mistake(make(tmp_path, name))
    assert said is not None and f"{tmp_path}, which holds a run" in said and "--overwrite_output_dir" in said
    assert ("--resume_from_checkpoint latest" in said) == name.startswith("checkpoint")
    assert mistake(tmp_path, overwrite=True) is None


def test_a_run_goes_on_in_its_own_folder_only(tmp_path: Path) -> None:
    folder = make(tmp_path / "run", "checkpoint-10/config.json")
    assert mistake(folder, resume=str(folder / "checkpoint-10")) is None
    said = mistake(folder, resume=str(folder / "checkpoint-20"))
    assert said is not None and "is at step 20, and `max_steps` is 20" in said
    said = mistake(folder, resume=str(tmp_path / "other" / "checkpoint-10"))
    assert said is not None and "which holds a run" in said


def test_what_a_run_starts_from_is_not_removed(tmp_path: Path) -> None:
    folder = make(tmp_path, "checkpoint-10/config.json")
    for start in (
        {"resume": str(folder / "checkpoint-10")},
        {"model": str(folder)},
        {"model": f"{folder}/checkpoint-10"},
    ):
        said = mistake(folder, overwrite=True, **start)
        assert said is not None and "would remove what the run starts from" in said


@pytest.mark.parametrize("names", [(), OF_THE_USER])
def test_a_folder_without_a_run_is_free(tmp_path: Path, names: tuple[str, ...]) -> None:
    assert mistake(make(tmp_path / "new", *names)) is None


def test_a_run_is_removed_and_nothing_else(tmp_path: Path) -> None:
    clear_output_folder(make(tmp_path, *OF_A_RUN, *OF_THE_USER))
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == sorted(
        OF_THE_USER
    )


def test_without_a_run_nothing_is_removed(tmp_path: Path) -> None:
    clear_output_folder(make(tmp_path, "tokenizer.json", "config.json", "critic/notes.txt"))
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 3
