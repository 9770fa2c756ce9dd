"""Files that are there as a whole or not at all, and what is said of those that are not there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO
from uuid import uuid4


def write_whole(path: Path, content: bytes | Callable[[IO[bytes]], object]) -> None:
    """Write a file that takes the name `path` once it is complete, even if the machine fails.

    Whoever opens `path` meanwhile finds what was there before. Its folder must be there. `content` may be a function
    that writes into the open file.
    """
    partial = path.with_name(f".{path.name}.{uuid4().hex}")  # processes of several machines may write the same file
    try:
        with partial.open("wb") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                content(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def full_disk_is_said(folder: Path) -> Iterator[None]:
    """Around what torch and safetensors write: where a disk is full, neither raises an OSError, or torch says why."""
    try:
        yield
    except Exception:
        with TemporaryFile(dir=folder) as file:
            file.write(bytes(2**20))  # raises one
        raise


MADE_BY: dict[tuple[str, ...], str] = {
    ("runs", "quickstart"): "sorl quickstart",
    ("runs", "train-lm"): "sorl quickstart --model MODEL",
}
"""Folder that recipes read -> the command that writes it."""


def missing(name: str, path: str | os.PathLike[str], kind: str = "file or folder") -> str:
    """Says that what the argument `name` names is not there, and what makes it if that is the quickstart."""
    if made_by := MADE_BY.get(Path(path).parts[:2]):
        kind = f"{kind.partition(',')[0]}: run `{made_by}` in this folder first, which makes it"
    return f"`{name}` is {str(path)!r}, but there is no such {kind}"


def check_run_folder(path: str | os.PathLike[str]) -> None:
    """Raise FileNotFoundError for a path that cannot be the folder of a run."""
    if not Path(path).is_dir():
        problem = "is no folder" if Path(path).exists() else "does not exist"
        raise FileNotFoundError(
            f"{path} {problem}: name the folder of a run, as `sorl train` or `sorl evaluate` wrote it"
        )
