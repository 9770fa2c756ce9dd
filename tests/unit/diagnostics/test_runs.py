from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from sorl_trl.diagnostics.runs import Run, Series, load_run, load_runs


def write_state(folder: Path, step: int, history: Any = None, **rest: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    history = [{"step": step, "reward": float(step)}] if history is None else history
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": history, **rest}))


class TestSeries:
    def test_an_average_stands_at_the_last_step_that_it_covers(self) -> None:
        series = Series(tuple(range(8, 8 * 21, 8)), tuple(map(float, range(20))))
        assert series.smoothed().steps[0] == 5 * 8
        assert series.smoothed().values[0] == 2.0
        assert series.smoothed().steps[-1] == series.steps[-1]

    def test_draws_what_is_there(self) -> None:
        """Rollout metrics are missing from most entries, None is what TRL logs for no value, and NaN happens."""
        history = [{"step": 1, "x": 2}, {"step": 2}, {"step": 3, "x": None}, {"step": 4, "x": math.nan}]
        run = Run("a", [*history, {"step": 5, "x": math.inf}, {"step": 6, "x": "text"}, {"step": 7, "x": 0.5}])
        assert run.series("x") == Series((1, 7), (2.0, 0.5))
        assert run.series("y") == Series((), ()) == run.series("y").smoothed()
        assert run.last_step == 7
        assert Run("b", []).last_step == 0


class TestLoadRun:
    def test_a_finished_run(self, tmp_path: Path) -> None:
        """The folder and its last checkpoint have the same step; only the folder has what the end of training logs."""
        end = [{"step": 8, "reward": 1.0}, {"step": 8, "train_loss": 0.5}]
        write_state(tmp_path, 8, end, max_steps=8, save_steps=4)
        write_state(tmp_path / "checkpoint-8", 8)
        assert load_run(tmp_path, "mine") == Run("mine", end, 8)

    def test_a_run_under_way(self, tmp_path: Path) -> None:
        """Checkpoint 10 is after 9, which an order by name would not know, and after an earlier run's end."""
        for step in (9, 10):
            write_state(tmp_path / f"checkpoint-{step}", step, max_steps=20)
        write_state(tmp_path, 4)
        assert load_run(tmp_path, "mine").last_step == 10

    def test_a_folder_without_a_run(self, tmp_path: Path) -> None:
        (tmp_path / "checkpoint-1").mkdir()
        with pytest.raises(FileNotFoundError, match=rf"{tmp_path} holds no trainer_state\.json.*`output_dir`"):
            load_run(tmp_path, "mine")

    @pytest.mark.parametrize("text", ["", '{"global_step": 4, "log_history": [{"st', "\x00"])
    def test_a_half_written_file(self, tmp_path: Path, text: str) -> None:
        write_state(tmp_path / "checkpoint-4", 4)
        (tmp_path / "checkpoint-8").mkdir()
        broken = tmp_path / "checkpoint-8" / "trainer_state.json"
        broken.write_text(text)
        with pytest.raises(ValueError, match=rf"{broken} is not complete JSON .* try again"):
            load_run(tmp_path, "mine")

    def test_several_runs_each_once(self, tmp_path: Path) -> None:
        for number, name in enumerate("cab"):
            write_state(tmp_path / name, number)
        runs = load_runs([tmp_path / "c", tmp_path / "a", str(tmp_path / "b"), f"{tmp_path / 'a'}/"])
        expected = [(str(tmp_path / name), number) for number, name in enumerate("cab")]
        assert [(run.name, run.last_step) for run in runs] == expected
