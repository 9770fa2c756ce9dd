"""Files that are there as a whole or not at all, and what is said of those that are not there."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO


def write_whole(path: Path, content: bytes | Callable[[IO[bytes]], object]) -> None:
    """Write a file that takes the name `path` once it is complete, even if the machine fails.

    Whoever opens `path` meanwhile finds what was there before.

    Args:
        path: The file; its folder must be there.
        content: What to write, or a function that writes it into the open file.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
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


def missing(name: str, path: str | os.PathLike[str], kind: str = "file or folder") -> str:
    """Says that what the argument `name` names is not there, and who makes it if it is of the quickstart."""
    if Path(path).parts[:2] == ("runs", "quickstart"):
        kind = f"{kind.partition(',')[0]}: run `sorl quickstart` in this folder first, which makes it"
    return f"`{name}` is {str(path)!r}, but there is no such {kind}"


def check_run_folder(path: str | os.PathLike[str]) -> None:
    """Raise FileNotFoundError for a path that cannot be the folder of a run."""
    if not Path(path).is_dir():
        problem = "is no folder" if Path(path).exists() else "does not exist"
        raise FileNotFoundError(
            f"{path} {problem}: name the folder of a run, as `sorl train` or `sorl evaluate` wrote it"
        )
