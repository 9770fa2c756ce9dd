"""The manifest of a saved index: which engine made it, and from what."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
# Goes up with any change to the files or to `tokenize`: an index of other tokens would not fail, but find too little.
FORMAT_VERSION = 3
LIBRARIES = {"bm25": "bm25s", "tantivy": "tantivy"}
"""Engine -> what reads its files. Those of the others are plain arrays, which outlive any version of a library."""


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
    library: str
    """Whose files these are, with the series that can read them, as `library_of` gives it."""
    num_documents: int
    sources: list[Fingerprint]
    """Of the corpus files that it was made from, in the order of reading."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What else the answers depend on."""
    format_version: int = FORMAT_VERSION

    @property
    def identity(self) -> str:
        """A short name of the content: of the corpus, and of how the engine reads it."""
        content = [self.format_version, self.engine, self.library, self.settings, self.sources]
        return f"{self.engine}-{hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]}"


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write `manifest.json`."""
    (directory / MANIFEST).write_text(json.dumps(asdict(manifest), indent=2) + "\n", encoding="utf-8")


def read_manifest(directory: Path) -> Manifest:
    """Read `manifest.json`.

    Raises:
        FileNotFoundError: There is no such directory.
        ValueError: There is no manifest: whatever the directory holds, it is no index.
        IndexCorrupted: The manifest is one of another version.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"index_dir {directory} is not a directory; build the index first")
    if not (directory / MANIFEST).is_file():
        raise ValueError(f"index {directory}: there is none, for {MANIFEST} is missing; name another, or build one")
    try:
        record = json.loads((directory / MANIFEST).read_bytes())
        if record["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format_version is {record['format_version']!r}, allowed is {FORMAT_VERSION}")
        return Manifest(**record)
    except (ValueError, TypeError, LookupError) as error:
        raise IndexCorrupted(directory, f"{MANIFEST} cannot be read ({error})") from error


def check_manifest(directory: Path, engine: str) -> Manifest:
    """Read `manifest.json`, and check that an engine can use what is in `directory`.

    Raises:
        FileNotFoundError: There is no such directory.
        IndexCorrupted: It was written by another version.
        ValueError: Another engine made it.
    """
    manifest = read_manifest(directory)
    if manifest.engine != engine:
        raise ValueError(
            f"index {directory}: made by the engine {manifest.engine!r}, not {engine!r}; use `open_index`"
        )
    if manifest.library != (library := library_of(engine)):
        raise IndexCorrupted(directory, f"{MANIFEST} says library {manifest.library!r}, installed is {library!r}")
    return manifest


def library_of(engine: str) -> str:
    """The "bm25s 0.3" of bm25s 0.3.11: libraries keep their files readable within a minor version.

    Raises:
        PackageNotFoundError: It is not installed (an `ImportError`).
    """
    if engine not in LIBRARIES:
        return "numpy npy"
    return " ".join([LIBRARIES[engine], ".".join(version(LIBRARIES[engine]).split(".")[:2])])


def fingerprint(path: Path) -> Fingerprint:
    """Read the file once, a megabyte at a time."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            size += len(block)
    return {"sha256": digest.hexdigest(), "bytes": size}
