"""The command that writes the page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sorl_trl.command_line import UserMistake
from sorl_trl.records.trained import write_trained
from sorl_trl.viewer.command import main, write_page
from sorl_trl.viewer.data import TRAINING
from tests.unit.evaluation.trajectories import answered, evaluated, question
from tests.unit.viewer.entries import TRAINED, Parsed, content, write_evaluation


def shown(page: Path) -> Any:
    return content(Parsed(page.read_text("utf-8")))


def test_of_training_beside_the_settings_that_it_was_told(tmp_path: Path) -> None:
    write_trained(tmp_path, 10, 0, [TRAINED])
    (tmp_path / "settings.json").write_text(json.dumps({"seed": 7}))
    write_page(tmp_path, tmp_path / "page.html")
    found = shown(tmp_path / "page.html")
    assert found["kind"] == TRAINING
    assert found["trajectories"][0]["segments"][0]["tokens"]["clipped"] == "ioc"


def test_each_step_has_as_many_and_what_is_left_out_is_said(tmp_path: Path) -> None:
    for step in (10, 20):
        write_trained(tmp_path, step, 0, [replace(TRAINED, step=step)] * 5)
    assert write_page(tmp_path, tmp_path / "page.html", limit=4)[:2] == (4, 10)
    found = shown(tmp_path / "page.html")
    assert [entry["key"] for entry in found["trajectories"]] == ["step-10/1", "step-10/2", "step-20/1", "step-20/2"]
    assert found["notes"] == ["6 of 10 trajectories are left out: --limit is 4."]
    assert write_page(tmp_path, tmp_path / "page.html", limit=1)[:2] == (1, 10)
    assert write_page(tmp_path, tmp_path / "page.html", limit=10)[:2] == (10, 10)


def test_a_run_without_a_finished_batch(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text('{"datasets": {"nq": "hash"}}')
    with pytest.raises(ValueError, match="no trajectory yet"):
        write_page(tmp_path, tmp_path / "page.html")


def test_of_training_says_where_the_evaluation_beside_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").touch()
    write_trained(tmp_path, 10, 0, [TRAINED])
    write_evaluation(tmp_path / "evaluation", evaluated(question("Ada"), answered("Ada")))
    main([str(tmp_path), "-o", str(tmp_path / "page.html")])
    hint = f"sorl view {tmp_path / 'evaluation'}"
    assert hint in capsys.readouterr().out
    assert hint in shown(tmp_path / "page.html")["notes"][0]
    assert shown(tmp_path / "page.html")["kind"] == TRAINING


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{}"], "holds no trajectories"),
        (["{}/none"], "none does not exist"),
        (["{}", "--limit", "0"], "at least 1"),
        (
            ["{}", "-o", "{}/none/page.html"],
            "`output` is '.*/none/page.html', but must be a file in an existing folder",
        ),
        (["{}", "-o", "{}"], "but must be a file in an existing folder"),
    ],
)
def test_a_mistake_is_a_sentence(tmp_path: Path, words: list[str], said: str) -> None:
    with pytest.raises(UserMistake, match=said):
        main([word.format(tmp_path) for word in words])
