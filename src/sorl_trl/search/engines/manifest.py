"""The manifest of a saved index: which engine made it, from what, and a hash of every file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

MANIFEST = "manifest.json"
# Goes up with any change to the files or to `tokenize`: an index of other tokens would not fail, but find too little.
FORMAT_VERSION = 2


class IndexCorrupted(ValueError):
    """A saved index must not be used. The message names the file and says what to do."""

    def __init__(self, directory: Path, problem: str) -> None:
        super().__init__(f"index {directory}: {problem}; delete the directory and build the index again")


class IndexOutdated(ValueError):
    """A saved index was made from another corpus than the one at hand."""

    def __init__(self, directory: Path, corpus: str) -> None:
        super().__init__(
            f"index {directory}: it was built from another content than {corpus} has now; delete the directory "
            "to build it again, or name another index"
        )


Fingerprint = dict[str, "str | int"]
"""`sha256` and size in `bytes` of a file."""


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`."""

    engine: str
    library: str
    """Whose files these are, with the series that can read them, as `library_series` gives it."""
    num_documents: int
    sources: list[Fingerprint]
    """Of the corpus files that it was made from, in the order of reading."""
    settings: dict[str, str] = field(default_factory=dict)
    """What else the answers depend on."""
    files: dict[str, Fingerprint] = field(default_factory=dict)
    """Of its own files, by their paths inside the directory."""
    format_version: int = FORMAT_VERSION

    @property
    def identity(self) -> str:
        """A short name of the content: of the hashes of all files, and of how the engine reads them."""
        content = [self.engine, self.library, self.settings, self.files]
        return f"{self.engine}-{hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]}"


def write_manifest(directory: Path, file_names: Iterable[str], manifest: Manifest) -> None:
    """Write `manifest.json`, with the fingerprints of the named files of `directory`."""
    manifest = replace(manifest, files={name: fingerprint(directory / name) for name in sorted(file_names)})
    (directory / MANIFEST).write_text(json.dumps(asdict(manifest), indent=2) + "\n", encoding="utf-8")


def read_manifest(directory: Path) -> Manifest:
    """Read `manifest.json`; the files that it names are not looked at.

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
        # Before the fields, which another version may have changed.
        found = record["format_version"]
        manifest = Manifest(**record) if found == FORMAT_VERSION else None
    except (ValueError, TypeError, LookupError) as error:
        raise IndexCorrupted(directory, f"{MANIFEST} is not a manifest ({error})") from error
    if manifest is None:
        raise IndexCorrupted(directory, f"{MANIFEST} says format_version {found!r}, allowed is {FORMAT_VERSION}")
    if not isinstance(manifest.num_documents, int) or not isinstance(manifest.files, dict):
        raise IndexCorrupted(directory, f"{MANIFEST} needs an integer `num_documents` and an object `files`")
    return manifest


def check_manifest(
    directory: Path, engine: str, library: str, file_names: Iterable[str], hashed_bytes: int | None = None
) -> Manifest:
    """Read `manifest.json`, and check that an engine can use what is in `directory`. Each file is read once.

    Args:
        engine: The engine that must have made it.
        library: The installed library, as `library_series` gives it.
        file_names: What must be there, beside all that the manifest names.
        hashed_bytes: Files above this size are checked by their size alone: hashing gigabytes would take longer than
            all else at loading. A bit that flips in one of them is not found. `None` hashes every file.

    Raises:
        FileNotFoundError: There is no such directory.
        IndexCorrupted: The manifest or a file is missing or changed, or was written by another version.
        ValueError: Another engine made it.
    """
    manifest = read_manifest(directory)
    if manifest.engine != engine:
        raise ValueError(
            f"index {directory}: made by the engine {manifest.engine!r}, not {engine!r}; use `open_index`"
        )
    if manifest.library != library:
        raise IndexCorrupted(directory, f"{MANIFEST} says library {manifest.library!r}, installed is {library!r}")
    for name in sorted({*file_names, *manifest.files}):
        _check_file(directory, name, manifest.files.get(name), hashed_bytes)
    return manifest


def _check_file(directory: Path, name: str, recorded: Fingerprint | None, hashed_bytes: int | None) -> None:
    path = directory / name
    if not path.is_file():
        raise IndexCorrupted(directory, f"{name} is missing")
    size = path.stat().st_size
    by_size = hashed_bytes is not None and size > hashed_bytes
    found: Fingerprint = {"bytes": size} if by_size else fingerprint(path)
    if not isinstance(recorded, dict) or any(recorded.get(key) != value for key, value in found.items()):
        raise IndexCorrupted(directory, f"{name} has changed: {MANIFEST} says {recorded}, found {found}")


def check_sources(directory: Path, corpus_files: Sequence[Path]) -> None:
    """Raise `IndexOutdated` unless the index in `directory` was made from what these files hold. Each is read once."""
    if read_manifest(directory).sources != [fingerprint(path) for path in corpus_files]:
        raise IndexOutdated(directory, ", ".join(map(str, corpus_files)))


def library_series(distribution: str) -> str:
    """The "bm25s 0.3" of bm25s 0.3.11: libraries keep their files readable within a minor version.

    Raises:
        PackageNotFoundError: It is not installed (an `ImportError`).
    """
    return " ".join([distribution, ".".join(version(distribution).split(".")[:2])])


def fingerprint(path: Path) -> Fingerprint:
    """Read the file once, a megabyte at a time."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            size += len(block)
    return {"sha256": digest.hexdigest(), "bytes": size}
