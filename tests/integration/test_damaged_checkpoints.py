"""A checkpoint that is not whole is refused before anything of it is loaded: the file is named, and a whole one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sorl_trl.trainers.checkpoint import resume_point
from tests.agents import build_agent

NEWEST = "checkpoint-2"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run with two checkpoints."""
    folder = tmp_path_factory.mktemp("run")
    build_agent(folder, max_steps=2, save_strategy="steps", save_steps=1, num_iterations=1).train()
    return folder


@pytest.fixture
def newest(run: Path, tmp_path: Path) -> Path:
    """A copy of the newest checkpoint, in a folder without others."""
    return Path(shutil.copytree(run / NEWEST, tmp_path / NEWEST))


def resumed(folder: Path, asked: Any = "latest") -> str | None:
    args: Any = SimpleNamespace(output_dir=folder)
    return resume_point(args, asked)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def garble(file: Path) -> None:
    file.write_text("}{ no such thing")


def empty(file: Path) -> None:
    file.write_bytes(b"")


DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    *((Path.unlink, name) for name in ("optimizer.pt", "rng_state.pth", "model.safetensors")),
    *((empty, name) for name in ("optimizer.pt", "model.safetensors", "trainer_state.json")),
    *((cut, name) for name in ("model.safetensors", "trainer_state.json", "generation_cycle_0.pt")),
    (garble, "trainer_state.json"),
]


@pytest.mark.parametrize(("damage", "name"), DAMAGES, ids=lambda value: getattr(value, "__name__", value))
def test_the_file_is_named_and_the_newest_whole_checkpoint(
    run: Path, tmp_path: Path, damage: Callable[[Path], Any], name: str
) -> None:
    shutil.copytree(run, tmp_path / "out")
    damage(tmp_path / "out" / NEWEST / name)
    with pytest.raises(ValueError) as error:
        resumed(tmp_path / "out")
    assert all(each in str(error.value) for each in (name, NEWEST, str(tmp_path / "out" / "checkpoint-1")))


def test_the_newest_is_that_of_the_highest_step_which_was_written_to_its_end(run: Path, tmp_path: Path) -> None:
    """A run that is killed while it writes a checkpoint goes on from the one before; by its name it is refused."""
    with pytest.raises(ValueError, match=f"there is no checkpoint in {tmp_path}"):
        resumed(tmp_path)
    for step in (9, 10, 11):
        shutil.copytree(run / NEWEST, tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-11" / "trainer_state.json").unlink()
    assert resumed(tmp_path) == str(tmp_path / "checkpoint-10")
    with pytest.raises(ValueError, match=r"trainer_state\.json .*checkpoint-10\.$"):
        resumed(tmp_path, str(tmp_path / "checkpoint-11"))
    assert [resumed(tmp_path, asked) for asked in (None, False, "false")] == [None] * 3


def test_a_shard_that_is_gone(newest: Path) -> None:
    (newest / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1-of-2.safetensors"}}')
    with pytest.raises(ValueError, match=r"model-1-of-2\.safetensors is missing"):
        resumed(newest.parent)


@pytest.mark.parametrize("lacks", [0, 2])
def test_the_random_state_of_one_of_several_processes_is_gone(newest: Path, lacks: int) -> None:
    (newest / "rng_state.pth").rename(newest / "rng_state_0.pth")
    for rank in (1, 2):
        shutil.copy(newest / "rng_state_0.pth", newest / f"rng_state_{rank}.pth")
        shutil.copy(newest / "generation_cycle_0.pt", newest / f"generation_cycle_{rank}.pt")
    assert resumed(newest.parent) == str(newest)
    (newest / f"rng_state_{lacks}.pth").unlink()
    with pytest.raises(ValueError, match=rf"rng_state_{lacks}\.pth is missing"):
        resumed(newest.parent)
    (newest / f"generation_cycle_{lacks}.pt").unlink()
    assert resumed(newest.parent) == str(newest), "the process may have been one of another machine"


def test_deepspeeds_shards(newest: Path) -> None:
    """It keeps optimizer and schedule in them."""
    shard = newest / "global_step2" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shard.parent.mkdir()
    shutil.move(newest / "optimizer.pt", shard)
    (newest / "scheduler.pt").unlink()
    with pytest.raises(ValueError, match="latest is missing, which points DeepSpeed to its shards"):
        resumed(newest.parent)
    (newest / "latest").write_text("global_step2")
    assert resumed(newest.parent) == str(newest)
    cut(shard)
    with pytest.raises(ValueError, match=r"optim_states\.pt is empty or damaged"):
        resumed(newest.parent)
