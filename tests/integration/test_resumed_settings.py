"""What a resumed run is told otherwise than the run that it goes on with."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from sorl_trl import SOPPOTrainer
from sorl_trl.command_line import UserMistake
from sorl_trl.search import BM25Index
from sorl_trl.trainers.checkpoint import SETTINGS_FILE
from tests.agents import build_agent, search_index

FIELDS = {"num_iterations": 1, "steps_per_generation": 2, "save_strategy": "steps", "lr_scheduler_type": "linear"}
CHANGED = {"learning_rate": 0.5, "value_head_learning_rate": 0.4, "weight_decay": 0.3}
CHANGED |= {"adam_beta1": 0.2, "adam_beta2": 0.1, "adam_epsilon": 0.6}


def build(folder: Path, **overrides: Any) -> Any:
    index = folder / "index"
    search = BM25Index.load(index) if index.exists() else search_index(folder)
    return build_agent(folder, search, SOPPOTrainer, **{**FIELDS, "max_steps": 4, "save_steps": 2, **overrides})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    build(folder).train()
    return folder


@pytest.fixture
def checkpoint(run: Path, tmp_path: Path) -> Path:
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    return tmp_path / "checkpoint-2"


def test_what_the_optimizer_holds_goes_on_and_is_reported_as_it_acts(
    tmp_path: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = json.loads((checkpoint / SETTINGS_FILE).read_text())
    resumed = build(tmp_path, **CHANGED, save_steps=3)
    with caplog.at_level(logging.WARNING):
        resumed.train(resume_from_checkpoint=str(checkpoint))
    for name, value in CHANGED.items():
        assert f"`{name}` was {saved[name]}, is {value} (the checkpoint's goes on" in caplog.text
        assert getattr(resumed.args, name) == saved[name]
    groups = {bool(group.get("critic")): group for group in resumed.optimizer.param_groups}
    assert groups[False]["initial_lr"] == saved["learning_rate"] == 1e-3
    assert groups[False]["betas"] == (saved["adam_beta1"], saved["adam_beta2"])
    assert (groups[False]["eps"], groups[False]["weight_decay"]) == (saved["adam_epsilon"], saved["weight_decay"])
    assert groups[True]["initial_lr"] == saved["value_head_learning_rate"] == 0.1
    assert (tmp_path / "checkpoint-3").is_dir(), "checkpoints are saved as this run is told"


def test_an_optimizer_that_cannot_read_the_state_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(UserMistake, match="`optim` is 'adafactor'"):
        build(tmp_path, optim="adafactor").train(resume_from_checkpoint=str(checkpoint))


def test_optimizers_of_one_state_go_on_from_one_another(tmp_path: Path, checkpoint: Path) -> None:
    resumed = build(tmp_path, optim="adamw_torch")
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == 4
