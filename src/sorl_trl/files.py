"""Writes files so that they are never partial, and words the errors for missing ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO
from uuid import uuid4


def write_whole(path: Path, content: bytes | Callable[[IO[bytes]], object]) -> None:
    """Write a file that gets the name `path` only when complete, even if the machine fails.

    Until then, `path` has its previous content. Its folder must exist. `content` may be a function that writes into
    the open file.
    """
    partial = path.with_name(f".{path.name}.{uuid4().hex}")  # several machines may write the same file
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
def raise_if_disk_full(folder: Path) -> Iterator[None]:
    """Context that raises an OSError if writing fails on a full disk; torch and safetensors raise other errors."""
    try:
        yield
    except Exception:
        with suppress(FileNotFoundError), TemporaryFile(dir=folder) as file:
            file.write(bytes(2**20))  # raises an OSError if the disk is full
        raise


MADE_BY: dict[tuple[str, ...], str] = {
    ("runs", "quickstart"): "python quickstart.py",
    ("runs", "train-lm"): "python quickstart.py --model MODEL",
    ("data", "search_r1_train.jsonl"): "python examples/public_questions.py search_r1",
    ("data", "search_r1_test.jsonl"): "python examples/public_questions.py search_r1",
}
"""Folders and files that recipes read -> the command that creates them."""


def missing(name: str, path: str | os.PathLike[str], kind: str = "file or folder") -> str:
    """The message that the path of argument `name` does not exist, with the command that creates it, if any."""
    if made_by := MADE_BY.get(Path(path).parts[:2]):
        kind = f"{kind.partition(',')[0]}: run `{made_by}` in this folder first to create it"
    return f"`{name}` is {str(path)!r}, but there is no such {kind}"


def check_run_folder(path: str | os.PathLike[str]) -> None:
    """Raise FileNotFoundError for a path that cannot be the folder of a run."""
    if not Path(path).is_dir():
        problem = "is not a folder" if Path(path).exists() else "does not exist"
        raise FileNotFoundError(
            f"{path} {problem}: give the folder of a run, written by `sorl train` or `sorl evaluate`"
        )
