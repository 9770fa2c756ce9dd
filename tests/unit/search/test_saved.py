"""What a killed build leaves is no index, and is gone after the next build."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sorl_trl.search import BM25Index
from sorl_trl.search.engines.saved import YOUNG_S, staged

pytestmark = pytest.mark.trains

KILLED = """
import os, signal, sys
from sorl_trl.search.engines.saved import staged
with staged(sys.argv[1]) as directory:
    (directory / "half.npy").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def left_behind(index_dir: Path) -> list[Path]:
    return sorted(path for path in index_dir.parent.iterdir() if path.name.startswith(f".{index_dir.name}."))


def make_old(directory: Path) -> None:
    then = time.time() - 2 * YOUNG_S
    os.utime(directory, (then, then))


def test_the_next_build_deletes_what_a_killed_one_has_left(
    corpus_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index_dir = tmp_path / "index"
    assert subprocess.run([sys.executable, "-c", KILLED, str(index_dir)]).returncode == -signal.SIGKILL
    assert not index_dir.exists()
    [left] = left_behind(index_dir)
    other = tmp_path / ".index.of-another-kind"
    other.mkdir()
    make_old(left)
    make_old(other)
    with caplog.at_level(logging.WARNING):
        assert len(BM25Index.build(corpus_path, index_dir, show_progress=False)) == 7
    assert f"{left}: left by a build that was killed, deleted" in caplog.text
    assert left_behind(index_dir) == [other]


def test_a_build_under_way_and_a_young_one_are_left_alone(tmp_path: Path) -> None:
    index_dir = tmp_path / "index"
    with pytest.raises(KeyboardInterrupt), staged(index_dir) as under_way:
        (under_way / "half.npy").touch()
        make_old(under_way)
        with pytest.raises(KeyboardInterrupt), staged(index_dir) as another:
            assert left_behind(index_dir) == sorted([under_way, another])
            raise KeyboardInterrupt
        assert left_behind(index_dir) == [under_way]
        raise KeyboardInterrupt
    assert left_behind(index_dir) == []
    assert subprocess.run([sys.executable, "-c", KILLED, str(index_dir)]).returncode == -signal.SIGKILL
    [young] = left_behind(index_dir)
    with staged(index_dir):
        assert young.exists()
