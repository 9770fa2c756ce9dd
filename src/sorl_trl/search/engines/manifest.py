"""The manifest of a saved index: which engine made it, and from what."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from sorl_trl.files import missing

MANIFEST = "manifest.json"
# Goes up with any change to the files, be it a library's, or to `tokenize`: an index of other tokens would not fail,
# but find too little.
FORMAT_VERSION = 4


class IndexCorrupted(ValueError):
    """A saved index must not be used. The message names the file and says what to do."""

    def __init__(self, directory: Path, problem: str) -> None:
        super().__init__(f"index {directory}: {problem}; delete the directory and build the index again")


class IndexOutdated(ValueError):
    """A saved index was made from another corpus than the one at hand."""


Fingerprint = dict[str, "str | int"]
"""`sha256` and size in `bytes` of a file."""


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`."""

    engine: str
    num_documents: int
    sources: list[Fingerprint]
    """Of the corpus files that it was made from, in the order of reading."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What else the answers depend on."""
    format_version: int = FORMAT_VERSION

    @property
    def identity(self) -> str:
        """A short name of the content: of the corpus, and of how the engine reads it."""
        content = [self.format_version, self.engine, self.settings, self.sources]
        return f"{self.engine}-{hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]}"


def read_manifest(directory: Path, engine: str | None = None) -> Manifest:
    """Read `manifest.json`, of any engine or of the one that is named. Fields that are not known are passed over.

    Raises what `SavedIndex.load` raises.
    """
    if not directory.exists():
        raise FileNotFoundError(missing("index", directory))
    if not (directory / MANIFEST).is_file():
        raise FileNotFoundError(f"index {directory}: there is no {MANIFEST}; name another, or build the index")
    try:
        record = json.loads((directory / MANIFEST).read_bytes())
        if record["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format_version is {record['format_version']!r}, allowed is {FORMAT_VERSION}")
        manifest = Manifest(**{each.name: record[each.name] for each in fields(Manifest)})
    except (ValueError, TypeError, LookupError) as error:
        raise IndexCorrupted(directory, f"{MANIFEST} cannot be read ({error})") from error
    if engine not in (None, manifest.engine):
        raise ValueError(f"index {directory}: its engine is {manifest.engine!r}, not {engine!r}; use `open_index`")
    return manifest


def fingerprint(path: Path) -> Fingerprint:
    """Read the file once, a megabyte at a time."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            size += len(block)
    return {"sha256": digest.hexdigest(), "bytes": size}
