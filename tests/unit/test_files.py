from __future__ import annotations

from io import FileIO
from pathlib import Path
from typing import IO

import pytest

from sorl_trl.files import raise_if_disk_full, write_whole


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_whole(tmp_path / "a.txt", b"old")

    def half(file: IO[bytes]) -> None:
        file.write(b"n")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_whole(tmp_path / "a.txt", half)
    assert (tmp_path / "a.txt").read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [tmp_path / "a.txt"]


def test_a_full_disk_is_an_oserror_whatever_a_library_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        with raise_if_disk_full(tmp_path):
            raise RuntimeError("unexpected pos 64 vs 0")

    with pytest.raises(RuntimeError, match="unexpected pos"):
        fail()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("sorl_trl.files.TemporaryFile", lambda dir: FileIO("/dev/full", "w"))
    with pytest.raises(OSError, match="No space left on device"):
        fail()
