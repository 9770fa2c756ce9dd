from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import quickstart_time
from benchmarks.quickstart_time import format_table, main, read_seconds, summarize

from sorl_trl.command_line import UserMistake


def test_seconds_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "summary.json").write_text(json.dumps({"seconds": 90.0}))
    state = {"global_step": 240, "log_history": [{"step": 1, "loss": 0.5}, {"step": 240, "train_runtime": 60.0}]}
    (tmp_path / "policy" / "trainer_state.json").write_text(json.dumps(state))
    assert read_seconds(tmp_path) == {"seconds": 90.0, "step_seconds": 0.25}


def test_the_first_round_warms_up_unless_it_is_the_only_one() -> None:
    first, second, third = ({"seconds": s, "step_seconds": s / 100} for s in (90.0, 60.0, 70.0))
    assert summarize({"a": [first]})["a"]["seconds"] == 90
    row = summarize({"a": [first, second, third]})["a"]
    assert (row["seconds"], row["seconds_range"]) == (65, [60, 70])
    assert "| a | 65 (60 to 70) | 0.65 (0.6 to 0.7) |" in format_table({"a": row}, 3)


def test_checkouts_run_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "quickstart.py").touch()
    asked: list[tuple[str, int | None]] = []

    def run(checkout: Path, steps: int | None) -> dict[str, float]:
        asked.append((checkout.name, steps))
        return {"seconds": 1.0, "step_seconds": 0.1}

    monkeypatch.setattr(quickstart_time, "run_quickstart", run)
    checkouts = [str(tmp_path / "old"), str(tmp_path / "new")]
    main([*checkouts, "--rounds", "2", "--max-steps", "8", "--output", str(tmp_path / "results")])
    assert asked == [("old", 8), ("new", 8)] * 2
    assert list(json.loads((tmp_path / "results" / "quickstart_time.json").read_text())) == ["old", "new"]


def test_what_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserMistake, match=r"holds no quickstart\.py"):
        main([str(tmp_path)])
    (tmp_path / "quickstart.py").touch()
    with pytest.raises(UserMistake, match="a name of its own"):
        main([str(tmp_path), str(tmp_path)])
