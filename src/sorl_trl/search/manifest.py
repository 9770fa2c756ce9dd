"""The manifest of a saved index: what it was made with, and a hash of every file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import bm25s

MANIFEST = "manifest.json"
# Goes up with any change to the files or to `tokenize`: an index of other tokens would not fail, but find too little.
FORMAT_VERSION = 1


class IndexCorrupted(ValueError):
    """A saved index that must not be used. The message names the file and what to do."""

    def __init__(self, directory: Path, problem: str) -> None:
        super().__init__(f"index {directory}: {problem}; delete the directory and build the index again")


class IndexOutdated(ValueError):
    """A saved index of another corpus than the one at hand."""

    def __init__(self, directory: Path, corpus_path: Path) -> None:
        super().__init__(
            f"index {directory}: it was built from another content than {corpus_path} has now; delete the directory "
            "to build it again, or name another index"
        )


Fingerprint = dict[str, "str | int"]
"""`sha256` and size in `bytes` of a file."""


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`: fingerprints of the corpus it was made from and of its own files, by name."""

    format_version: int
    bm25s_version: str
    num_documents: int
    source: Fingerprint
    files: dict[str, Fingerprint]


def write_manifest(directory: Path, file_names: Sequence[str], num_documents: int, source: Fingerprint) -> None:
    """Write `manifest.json` for the named files of `directory`, made from a corpus of that fingerprint."""
    files = {name: fingerprint(directory / name) for name in file_names}
    manifest = Manifest(FORMAT_VERSION, bm25s.__version__, num_documents, source, files)
    (directory / MANIFEST).write_text(json.dumps(asdict(manifest), indent=2) + "\n", encoding="utf-8")


def check_manifest(directory: Path, file_names: Sequence[str]) -> Manifest:
    """Check the versions and every named file of `directory` against `manifest.json`. Each file is read once.

    Raises:
        IndexCorrupted: The manifest or a file is missing or changed, or was written by another version.
    """
    manifest = _read_manifest(directory)
    for name in file_names:
        if not (directory / name).is_file():
            raise IndexCorrupted(directory, f"{name} is missing")
        expected, found = manifest.files.get(name), fingerprint(directory / name)
        if expected != found:
            raise IndexCorrupted(directory, f"{name} has changed: {MANIFEST} says {expected}, found {found}")
    return manifest


def check_source(directory: Path, corpus_path: Path) -> None:
    """Raise `IndexOutdated` unless the index in `directory` was made from what `corpus_path` holds."""
    if _read_manifest(directory).source != fingerprint(corpus_path):
        raise IndexOutdated(directory, corpus_path)


def _read_manifest(directory: Path) -> Manifest:
    if not (directory / MANIFEST).is_file():
        raise IndexCorrupted(directory, f"{MANIFEST} is missing")
    try:
        manifest = Manifest(**json.loads((directory / MANIFEST).read_bytes()))
    except (ValueError, TypeError) as error:
        raise IndexCorrupted(directory, f"{MANIFEST} is not a manifest ({error})") from error
    found, written_by = manifest.format_version, manifest.bm25s_version
    if found != FORMAT_VERSION:
        raise IndexCorrupted(directory, f"{MANIFEST} says format_version {found!r}, allowed is {FORMAT_VERSION}")
    if _series(written_by) != _series(bm25s.__version__):
        raise IndexCorrupted(directory, f"{MANIFEST} says bm25s {written_by}, installed is {bm25s.__version__}")
    if not isinstance(manifest.num_documents, int) or not isinstance(manifest.files, dict):
        raise IndexCorrupted(directory, f"{MANIFEST} needs an integer `num_documents` and an object `files`")
    return manifest


def _series(version: object) -> list[str]:
    """The "0.3" of "0.3.11": bm25s keeps its files readable within a minor version."""
    return str(version).split(".")[:2]


def fingerprint(path: Path) -> Fingerprint:
    """Read the file once, a megabyte at a time."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            size += len(block)
    return {"sha256": digest.hexdigest(), "bytes": size}
