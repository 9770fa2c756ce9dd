"""Rows of results, to which several commands may add side by side: each takes runs that nobody works on."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from sorl_trl.files import write_whole

Row = dict[str, Any]


def read_rows(file: Path) -> list[Row]:
    """Those of a file, none where it is not there."""
    return list(json.loads(file.read_text())) if file.is_file() else []


def write_rows(rows: Sequence[Row], file: Path) -> None:
    """A line each. Whoever reads the file meanwhile finds what was there before."""
    write_whole(file, ("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n").encode())


@contextmanager
def locked(lock: Path) -> Iterator[None]:
    """Wait until no other process is in the block of this lock."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def claim(path: Path, lock: Path) -> bool:
    """Whether this process may make a run: nobody that lives works on it, as the file `path` tells the others."""
    with locked(lock):
        if path.is_file() and psutil.pid_exists(int(path.read_text() or 0)):
            return False
        path.write_text(str(os.getpid()))
    return True
