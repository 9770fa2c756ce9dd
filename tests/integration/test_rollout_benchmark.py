"""The rollout benchmark on a small cell: that all engines follow one script, and what it counts; never how fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks import rollout
from benchmarks.rollout_engines import ENGINES, measure

from sorl_trl.command_line import UserMistake

SMALL = ["--rows", "8", "--turn-tokens", "2-6", "--search-ms", "1", "--grid-alone"]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of one cell, measured in this process: starting one for each engine takes longer than all of them."""
    output = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout, "in_a_process", measure)
        rollout.main([*SMALL, "--output", str(output)])
    assert (output / "rollout.md").read_text().startswith("# What a rollout costs")
    loaded: dict[str, Any] = json.loads((output / "rollout.json").read_text())
    return loaded


def test_a_row_per_engine(result: dict[str, Any]) -> None:
    rows = result["rows"]
    assert [row["engine"] for row in rows] == [engine for engine in ENGINES if engine not in result["left_out"]]
    assert result["left_out"].keys() <= {"vllm_colocate"}
    keys = {"engine", "rows", "turn_tokens", "search_ms", "cpu_seconds", "wall_seconds", "waiting_seconds"}
    keys |= {"prefilled_over_needed", "row_steps_over_needed", "peak_memory_mb"}
    for row in rows:
        assert keys <= row.keys()
        assert (row["rows"], row["turn_tokens"], row["search_ms"]) == (8, "2-6", 1.0)
        assert row["wall_seconds"] > 0
        assert 0 <= row["waiting_seconds"] < row["wall_seconds"]


def test_slots_compute_each_token_once(result: dict[str, Any]) -> None:
    counted = {row["engine"]: (row["prefilled_over_needed"], row["row_steps_over_needed"]) for row in result["rows"]}
    assert counted["trl_loop"] == counted["lockstep"]
    assert min(counted["lockstep"]) > 1
    for engine in ("slots_lockstep", "slots_event"):
        assert counted[engine][0] < 1  # the prompt of a group, once
        assert counted[engine][1] == 1


def test_it_goes_on_where_it_ended(result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rollout.json").write_text(json.dumps({**result, "rows": result["rows"][:-1]}))
    measured: list[str] = []

    def remember(engine: str, cell: Any) -> dict[str, Any]:
        measured.append(engine)
        return next(row for row in result["rows"] if row["engine"] == engine)

    monkeypatch.setattr(rollout, "in_a_process", remember)
    rollout.main([*SMALL, "--go-on", "--output", str(tmp_path)])
    assert measured == [result["rows"][-1]["engine"]]


def test_a_folder_without_a_quickstart_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserMistake, match="holds no quickstart"):
        rollout.main([*SMALL, "--quickstart", str(tmp_path), "--output", str(tmp_path)])


@pytest.mark.slow
def test_a_process_of_its_own() -> None:
    (cell,) = rollout.grid([2], ["2-6"], [0.0])
    assert rollout.in_a_process("lockstep", cell)["peak_memory_mb"] > 0
