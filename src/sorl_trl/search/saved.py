"""What saved indexes share: how they are written, and what they answer beyond a search."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Protocol
from uuid import uuid4

from sorl_trl.search.backend import SearchBackend


class SavedIndex(SearchBackend, Protocol):
    """A search engine that lies in one directory."""

    engine: ClassVar[str]
    """Its name in the manifest."""

    @property
    def identity(self) -> str:
        """A short name of its content, for keys of caches: equal names give equal answers."""
        ...

    def __len__(self) -> int:
        """The number of passages."""
        ...


@contextmanager
def staged(index_dir: str | os.PathLike[str]) -> Iterator[Path]:
    """A directory to write an index into, renamed to `index_dir` when complete: it is there as a whole or not at all.

    Raises:
        FileExistsError: There is already something at `index_dir`.
    """
    index_dir = Path(index_dir)
    if index_dir.exists():
        raise FileExistsError(f"index_dir {index_dir} exists; load it, delete it or choose another")
    staging = index_dir.with_name(f".{index_dir.name}.{uuid4().hex}")
    staging.mkdir(parents=True)
    try:
        yield staging
        staging.rename(index_dir)
    except BaseException as error:  # Ctrl-C too must not leave a gigabyte behind.
        shutil.rmtree(staging, ignore_errors=True)
        # Another process, on another node even, may have finished the same index meanwhile.
        if not (isinstance(error, OSError) and index_dir.is_dir()):
            raise
