from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sorl_trl.diagnostics.runs import (
    Run,
    Series,
    load_run,
    load_runs,
    moving_average,
    unique_names,
    window_size,
)

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


def write_state(folder: Path, step: int, history: Any = None, **rest: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    history = [{"step": step, "reward": float(step)}] if history is None else history
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": history, **rest}))


class TestMovingAverage:
    def test_by_hand(self) -> None:
        assert moving_average([1.0, 3.0, 5.0, 10.0], 2) == [2.0, 4.0, 7.5]
        assert moving_average([1.0, 3.0], 1) == [1.0, 3.0]

    def test_fewer_values_than_the_window(self) -> None:
        assert moving_average([1.0, 2.0], 3) == []
        assert moving_average([], 1) == []

    def test_a_huge_value_leaves_no_trace_after_its_window(self) -> None:
        assert moving_average([1e30, 0.1, 0.1, 0.1], 2)[1:] == [0.1, 0.1]

    @given(VALUES, st.integers(1, 60))
    def test_lies_between_the_extremes_of_its_window(self, values: list[float], window: int) -> None:
        means = moving_average(values, window)
        assert len(means) == max(0, len(values) - window + 1)
        for start, mean in enumerate(means):
            covered = values[start : start + window]
            assert min(covered) - 1e-6 <= mean <= max(covered) + 1e-6

    @given(VALUES, st.integers(1, 10), st.floats(-10, 10))
    def test_moves_with_the_values(self, values: list[float], window: int, shift: float) -> None:
        moved = moving_average([value + shift for value in values], window)
        assert moved == pytest.approx([mean + shift for mean in moving_average(values, window)], abs=1e-6)

    def test_an_empty_window_is_refused(self) -> None:
        with pytest.raises(ValueError, match="`window` is 0"):
            moving_average([1.0], 0)

    @pytest.mark.parametrize(("count", "window"), [(0, 1), (19, 1), (20, 5), (119, 5), (240, 12), (9000, 100)])
    def test_window_size(self, count: int, window: int) -> None:
        assert window_size(count) == window


class TestSeries:
    def test_an_average_stands_at_the_last_step_that_it_covers(self) -> None:
        series = Series(tuple(range(8, 8 * 21, 8)), tuple(map(float, range(20))))
        assert series.smoothed().steps[0] == 5 * 8
        assert series.smoothed().values[0] == 2.0
        assert series.smoothed().steps[-1] == series.steps[-1]

    def test_a_short_one_is_its_own_average(self) -> None:
        series = Series((1, 2), (3.0, 4.0))
        assert series.smoothed() == series

    def test_draws_what_is_there(self) -> None:
        """Rollout metrics are missing from most entries, None is what TRL logs for no value, and NaN happens."""
        history = [{"step": 1, "x": 2}, {"step": 2}, {"step": 3, "x": None}, {"step": 4, "x": math.nan}]
        run = Run("a", [*history, {"step": 5, "x": math.inf}, {"step": 6, "x": "text"}, {"step": 7, "x": 0.5}])
        assert run.series("x") == Series((1, 7), (2.0, 0.5))
        assert run.non_finite_steps("x") == [4, 5]
        assert run.series("y") == Series((), ()) == run.series("y").smoothed()
        assert run.last_step == 7
        assert Run("b", []).last_step == 0

    @pytest.mark.parametrize("entry", [{"x": 1.0}, {"step": "1"}, {"step": True}, 3])
    def test_entries_have_a_step(self, entry: Any) -> None:
        with pytest.raises(ValueError, match="Entry 1 of `log_history` of 'a' has the `step`"):
            Run("a", [{"step": 1}, entry])

    @pytest.mark.parametrize("history", [{"step": 1}, "text", 3])
    def test_a_log_history_is_a_list(self, history: Any) -> None:
        with pytest.raises(ValueError, match="`log_history` of 'a' must be a list"):
            Run("a", history)


class TestLoadRun:
    def test_a_finished_run(self, tmp_path: Path) -> None:
        """The folder and its last checkpoint have the same step; only the folder has what the end of training logs."""
        end = [{"step": 8, "reward": 1.0}, {"step": 8, "train_loss": 0.5}]
        write_state(tmp_path, 8, end, max_steps=8, save_steps=4)
        write_state(tmp_path / "checkpoint-8", 8)
        (tmp_path / "config.json").write_text('{"hidden_size": 64}')
        (tmp_path / "critic").mkdir()
        (tmp_path / "critic" / "critic_config.json").write_text('{"kind": "head"}')
        (tmp_path / "training_args.bin").write_bytes(b"never read")
        run = load_run(tmp_path, "mine")
        assert (run.name, run.log_history, run.max_steps) == ("mine", end, 8)
        assert run.configuration == {
            "trainer_state.json": {"max_steps": 8, "save_steps": 4},
            "config.json": {"hidden_size": 64},
            "critic/critic_config.json": {"kind": "head"},
        }

    def test_a_run_under_way(self, tmp_path: Path) -> None:
        """Checkpoint 10 is after 9, which an order by name would not know, and after an earlier run's end."""
        for step in (9, 10):
            write_state(tmp_path / f"checkpoint-{step}", step, max_steps=20)
        write_state(tmp_path, 4)
        (tmp_path / "config.json").write_text('{"hidden_size": 32}')
        (tmp_path / "checkpoint-10" / "config.json").write_text('{"hidden_size": 64}')
        run = load_run(tmp_path, "mine")
        assert run.last_step == 10
        assert run.configuration["config.json"] == {"hidden_size": 64}

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

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("[]", "must hold a JSON object, but holds a list"),
            ('{"log_history": []}', "must have a whole number `global_step`"),
            ('{"global_step": 1, "log_history": {}}', "and a list `log_history`"),
        ],
    )
    def test_another_kind_of_file(self, tmp_path: Path, text: str, message: str) -> None:
        (tmp_path / "trainer_state.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_run(tmp_path, "mine")

    def test_several_runs_each_once(self, tmp_path: Path) -> None:
        for number, name in enumerate("cab"):
            write_state(tmp_path / name, number)
        runs = load_runs([tmp_path / "c", tmp_path / "a", str(tmp_path / "b"), tmp_path / "b" / ".." / "a"])
        assert [(run.name, run.last_step) for run in runs] == [("c", 0), ("a", 1), ("b", 2)]


class TestUniqueNames:
    def test_in_the_order_of_the_paths(self) -> None:
        assert unique_names([Path("/x/c"), Path("/x/a"), Path("/y/b")]) == ["c", "a", "b"]

    def test_as_many_parts_as_it_takes(self) -> None:
        paths = [Path("/x/one/policy"), Path("/x/two/policy"), Path("/y/two/policy"), Path("/y/other")]
        assert unique_names(paths) == ["x/one/policy", "x/two/policy", "y/two/policy", "/y/other"]

    def test_the_same_path_twice_is_refused(self) -> None:
        with pytest.raises(ValueError, match="`paths` must all differ"):
            unique_names([Path("/a"), Path("/a")])

    @given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=4), unique_by=tuple, max_size=8))
    def test_names_differ_and_end_their_paths(self, parts: list[list[str]]) -> None:
        paths = [Path("/", *each) for each in parts]
        names = unique_names(paths)
        assert len(set(names)) == len(paths)
        assert all(str(path).endswith(name.lstrip("/")) for path, name in zip(paths, names, strict=True))
