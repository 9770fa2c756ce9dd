"""A checkpoint that is not whole is refused before anything of it is loaded: the file is named, and a whole one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sorl_trl.records.resume_point import resume_point
from tests.agents import build_agent

NEWEST = "checkpoint-2"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run with two checkpoints."""
    folder = tmp_path_factory.mktemp("run")
    build_agent(folder, max_steps=2, save_strategy="steps", save_steps=1, num_iterations=1).train()
    return folder


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def garble(file: Path) -> None:
    file.write_text("}{ no such thing")


def empty(file: Path) -> None:
    file.write_bytes(b"")


DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    *((Path.unlink, name) for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth")),
    *((damage, "optimizer.pt") for damage in (empty, cut, garble)),
    *((damage, "model.safetensors") for damage in (empty, cut, garble)),
    *((damage, "trainer_state.json") for damage in (empty, cut, garble)),
    *((cut, name) for name in ("scheduler.pt", "generation_cycle_0.pt", "rng_state.pth")),
]


@pytest.mark.parametrize(("damage", "name"), DAMAGES, ids=lambda value: getattr(value, "__name__", value))
def test_the_file_is_named_and_the_newest_whole_checkpoint(
    run: Path, tmp_path: Path, damage: Callable[[Path], Any], name: str
) -> None:
    shutil.copytree(run, tmp_path / "out")
    damage(tmp_path / "out" / NEWEST / name)
    for asked in ("latest", "true", True, str(tmp_path / "out" / NEWEST)):
        with pytest.raises(ValueError) as error:
            resume_point(SimpleNamespace(output_dir=tmp_path / "out"), asked)
        assert name in str(error.value)
        assert NEWEST in str(error.value)
        assert str(error.value).endswith(f"the newest whole checkpoint is {tmp_path / 'out' / 'checkpoint-1'}.")


def test_the_newest_is_one_that_was_written_to_its_end(run: Path, tmp_path: Path) -> None:
    """A run that is killed while it writes a checkpoint goes on from the one before; by its name it is refused."""
    shutil.copytree(run, tmp_path / "out")
    (tmp_path / "out" / NEWEST / "trainer_state.json").unlink()
    args = SimpleNamespace(output_dir=tmp_path / "out")
    assert resume_point(args, "latest") == str(tmp_path / "out/checkpoint-1")
    with pytest.raises(ValueError, match=r"no whole checkpoint, for its trainer_state\.json .*checkpoint-1\.$"):
        resume_point(args, str(tmp_path / "out" / NEWEST))


def test_weights_that_are_gone(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / NEWEST, tmp_path / NEWEST)
    (tmp_path / NEWEST / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no weights.*there is no whole checkpoint"):
        resume_point(SimpleNamespace(output_dir=tmp_path), "latest")


def test_a_shard_that_is_gone(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / NEWEST, tmp_path / NEWEST)
    (tmp_path / NEWEST / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "model-1-of-2.safetensors"}}'
    )
    with pytest.raises(ValueError, match=r"model-1-of-2\.safetensors is missing"):
        resume_point(SimpleNamespace(output_dir=tmp_path), "latest")


@pytest.mark.parametrize("lacks", [0, 1, 2])
def test_the_random_state_of_one_of_several_processes_is_gone(run: Path, tmp_path: Path, lacks: int) -> None:
    folder = tmp_path / NEWEST
    shutil.copytree(run / NEWEST, folder)
    (folder / "rng_state.pth").rename(folder / "rng_state_0.pth")
    for rank in (1, 2):
        shutil.copy(folder / "rng_state_0.pth", folder / f"rng_state_{rank}.pth")
        shutil.copy(folder / "generation_cycle_0.pt", folder / f"generation_cycle_{rank}.pt")
    args = SimpleNamespace(output_dir=tmp_path)
    assert resume_point(args, "latest") == str(folder)
    (folder / f"rng_state_{lacks}.pth").unlink()
    with pytest.raises(ValueError, match=rf"rng_state_{lacks}\.pth is missing"):
        resume_point(args, "latest")
    (folder / f"generation_cycle_{lacks}.pt").unlink()
    assert resume_point(args, "latest") == str(folder), "the process may have been one of another machine"


def test_a_process_without_random_state_is_named(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / NEWEST
    shutil.copytree(run / NEWEST, folder)
    (folder / "rng_state.pth").rename(folder / "rng_state_0.pth")  # as two processes would have left it
    build_agent(tmp_path, max_steps=2, num_iterations=1).train(resume_from_checkpoint=str(folder))
    assert [f"{folder} holds no random state for processes [0]" in each for each in caplog.messages].count(True) == 1


def test_deepspeeds_shards(run: Path, tmp_path: Path) -> None:
    """It keeps optimizer and schedule in them."""
    folder = tmp_path / NEWEST
    shutil.copytree(run / NEWEST, folder)
    (folder / "global_step2").mkdir()
    shutil.move(folder / "optimizer.pt", folder / "global_step2" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    (folder / "scheduler.pt").unlink()
    args = SimpleNamespace(output_dir=tmp_path)
    with pytest.raises(ValueError, match="latest, by which DeepSpeed finds its shards, is missing"):
        resume_point(args, "latest")
    (folder / "latest").write_text("global_step2")
    assert resume_point(args, "latest") == str(folder)
    cut(folder / "global_step2" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(ValueError, match=r"optim_states\.pt is empty or damaged"):
        resume_point(args, "latest")


@pytest.mark.parametrize("asked", [None, False, "false"])
def test_a_new_run(run: Path, asked: Any) -> None:
    assert resume_point(SimpleNamespace(output_dir=run), asked) is None


def test_the_newest_is_that_of_the_highest_step(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"there is no checkpoint in {tmp_path}"):
        resume_point(SimpleNamespace(output_dir=tmp_path), "latest")
    for step in (9, 10):
        shutil.copytree(run / NEWEST, tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-best").mkdir()
    assert resume_point(SimpleNamespace(output_dir=tmp_path), "latest") == str(tmp_path / "checkpoint-10")


def test_a_script_is_told_before_anything_is_loaded(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / NEWEST, tmp_path / NEWEST)
    cut(tmp_path / NEWEST / "model.safetensors")
    trainer = build_agent(tmp_path, max_steps=4)
    with pytest.raises(ValueError, match=r"model\.safetensors is empty or damaged"):
        trainer.train(resume_from_checkpoint=True)
