"""The launcher of these tests: a result counts whatever the exit code, one retry, and nothing outlives a timeout."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import pytest

from tests.distributed import launch as launch_module
from tests.distributed.cases import Case
from tests.distributed.launch import launch, run


def test_a_timeout_ends_workers_in_other_sessions(tmp_path: Path) -> None:
    """The command waits for a worker that never ends, in a session of its own, as accelerate's are."""
    worker = "import time; time.sleep(600)"
    started = tmp_path / "pid"
    launcher = (
        "import pathlib, subprocess, sys; "
        f"w = subprocess.Popen([sys.executable, '-c', {worker!r}], start_new_session=True); "
        f"p = pathlib.Path({str(started)!r}); p.write_text(str(w.pid)); w.wait()"
    )
    output = run([sys.executable, "-c", launcher], tmp_path / "log", timeout_s=3.0)
    pid = int(started.read_text())
    assert "not finished after 3.0 s" in output
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_one_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts: list[Path] = []

    def second_time_lucky(command: list[str], log: Path, timeout_s: float) -> str:
        attempts.append(log)
        if len(attempts) == 2:
            (tmp_path / "result.json").write_text(json.dumps({"turns": [1]}))
        return "aborted"

    monkeypatch.setattr(launch_module, "run", second_time_lucky)
    assert launch("ddp_cpu", Case(str(tmp_path))) == {"turns": [1]}
    assert len(attempts) == 2


def test_no_result_shows_the_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_module, "run", lambda *_: "x" * 9000 + "the last line")
    with pytest.raises(AssertionError, match=r"(?s)ddp_cpu left no result for Case.*the last line"):
        launch("ddp_cpu", Case(str(tmp_path)))
