"""Files that are there as a whole or not at all."""

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
