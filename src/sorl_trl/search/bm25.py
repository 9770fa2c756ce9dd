"""BM25 with bm25s: how text is split into tokens, and an index, a folder that `build` makes and `load` opens."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import numpy.typing as npt
from tqdm.auto import tqdm

from sorl_trl.files import missing
from sorl_trl.search.backend import check_request
from sorl_trl.search.corpus import Corpus, CorpusError, CorpusPaths, corpus_files, read_passages, write_corpus
from sorl_trl.types import Passage

_modules: dict[str, Any] = sys.modules
if "jax" in _modules:
    import bm25s
else:  # bm25s starts JAX where it is installed, which takes three quarters of a GPU's memory; nothing here needs it
    _modules["jax"] = None
    import bm25s

    del _modules["jax"]

MANIFEST = "manifest.json"
# Increase it with any change to the files, even by a library, or to `tokenize`: an index of other tokens would not
# fail, but find too little.
FORMAT_VERSION = 7
CORPUS = "corpus.jsonl"
"""The passage file in an index folder."""

# Lucene's English list. These words carry no topic and have by far the longest posting lists. In return, a query of
# nothing else, such as "To be or not to be", has no hit.
STOP_WORDS = frozenset(
    """
    a an and are as at be but by for if in into is it no not of on or such that the their then there these they this to
    was will with
    """.split()  # noqa: SIM905 - a list would take a line per word
)

# For example, vowels of Indic scripts: `\w` matches none of them, but words continue after them.
_MARKS = "".join(mark for mark in map(chr, range(0x370, 0x10000)) if unicodedata.category(mark)[0] == "M")
_TOKEN = re.compile(rf"[^\W_]+(?:[{_MARKS}]+[^\W_]*)*")
# Marks that writers may omit: accents of Latin, Greek and Cyrillic, points of Hebrew, vowels of Arabic.
_ACCENT = re.compile("[\u0300-\u036f\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u064b-\u065f\u0670]")


def tokenize(text: str) -> list[str]:
    """Split text into tokens: runs of letters and digits; no stop words, no stemming.

    Case and accents are folded: "Curaçao" and "CURACAO" give the same token. "U.S." gives "u" and "s". Text without
    letters and digits gives `[]`. Words that are written without spaces, as in Chinese and Thai, stay together.
    """
    folded = _ACCENT.sub("", unicodedata.normalize("NFKD", text).casefold())
    return [token for token in _TOKEN.findall(folded) if token not in STOP_WORDS]


class IndexOutdated(ValueError):
    """An index was built from another corpus, or by another version. The message gives the remedy."""


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`."""

    num_documents: int
    sources: list[dict[str, str | int]]
    """The fingerprints of the corpus files, in the order of reading."""
    format_version: int = FORMAT_VERSION


class BM25Index:
    """A `SearchBackend` for up to about a million passages, with bm25s's scores (Lucene's BM25, k1 = 1.5, b = 0.75).

    It searches title and text. Only passages that share a token with the query are hits. Equal scores keep the order
    of the corpus, so the same query always finds the same passages. A repeated token counts once, so a policy that
    repeats itself cannot slow the search down.

    Text is split as `tokenize` says: case and accents are folded, English stop words dropped, and nothing is stemmed.
    A script that imports bm25s before this package, with JAX installed, should set `JAX_PLATFORMS=cpu`: bm25s would
    start JAX, which takes three quarters of a GPU's memory.

    Make it with `build`, which holds the tokens of the whole corpus in memory, or with `load`, which maps the files
    into memory that processes on one machine share. The index folder has the passages, too: the corpus file is not
    needed afterwards.
    """

    thread_safe = True

    def __init__(self, directory: Path) -> None:
        self._manifest = read_manifest(directory)
        self._scorer = bm25s.BM25.load(directory, mmap=True, allow_pickle=False)
        self._corpus = Corpus(directory / CORPUS)

    @property
    def identity(self) -> str:
        """A short name of its content, for caches. Equal names give equal answers."""
        content = [self._manifest.format_version, self._manifest.sources]
        return f"bm25-{hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]}"

    def __len__(self) -> int:
        return self._manifest.num_documents

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See `SearchBackend.search_batch`. Returns fewer than `k` passages, or none, if there are no more hits."""
        check_request(queries, k)
        return [self._search(query, k) for query in queries]

    def _search(self, query: str, k: int) -> list[Passage]:
        vocabulary = self._scorer.vocab_dict
        scores = self._scorer.get_scores_from_ids(sorted({vocabulary[t] for t in tokenize(query) if t in vocabulary}))
        hits = np.flatnonzero(scores)
        best = hits[top_k(scores[hits], k)]
        return [replace(self._corpus[index], score=scores.item(index)) for index in best.tolist()]

    @classmethod
    def build(
        cls, corpus_path: CorpusPaths, index_dir: str | os.PathLike[str], show_progress: bool = True
    ) -> BM25Index:
        """Index a corpus into a new folder, and load it.

        The folder is written under another name and renamed when complete, so it is never partial. A build that is
        killed leaves the hidden folder behind.

        Args:
            corpus_path: JSONL files; see `Corpus`.
            index_dir: The folder to create, with its parents if missing.
            show_progress: Whether to show progress bars on stderr.

        Raises:
            CorpusError: The corpus is empty or a line is not a passage.
            FileExistsError: `index_dir` already exists.
        """
        index_dir, files = Path(index_dir), corpus_files(corpus_path)
        if index_dir.exists():
            raise FileExistsError(f"index_dir {index_dir} exists; load it, delete it or choose another")
        staging = index_dir.with_name(f".{index_dir.name}.{uuid4().hex}")
        staging.mkdir(parents=True)
        try:
            sources = [fingerprint(file) for file in files]
            size = _write(read_passages(files, show_progress), staging, show_progress)
            text = json.dumps(asdict(Manifest(size, sources)), indent=2) + "\n"
            (staging / MANIFEST).write_text(text, encoding="utf-8")
            staging.rename(index_dir)
        except BaseException as error:  # Even Ctrl-C must not leave a gigabyte behind.
            shutil.rmtree(staging, ignore_errors=True)
            # Another process, even on another node, may have finished the same index in the meantime.
            if not (isinstance(error, OSError) and index_dir.is_dir()):
                raise
        return cls.load(index_dir)

    @classmethod
    def open(cls, corpus_path: CorpusPaths, index_dir: str | os.PathLike[str]) -> BM25Index:
        """Load the index of a corpus, building it first if there is none. This reads the whole corpus.

        Raises IndexOutdated if the corpus has changed since the index was built, and the errors of `build` and `load`.
        """
        directory = Path(index_dir)
        if not directory.exists():
            return cls.build(corpus_path, index_dir)
        if read_manifest(directory).sources != [fingerprint(path) for path in corpus_files(corpus_path)]:
            raise _outdated(directory, f"it was built from different content than {corpus_path} has now")
        return cls.load(index_dir)

    @classmethod
    def load(cls, index_dir: str | os.PathLike[str]) -> BM25Index:
        """Open an index folder.

        Raises:
            FileNotFoundError: There is no such folder, or no index in it.
            IndexOutdated: Another version built it.
        """
        return cls(Path(index_dir))


def _write(passages: Iterable[Passage], directory: Path, show_progress: bool) -> int:
    """Write the passages and bm25s's files into a folder, and return the number of passages."""
    write_corpus(passages, directory / CORPUS)
    corpus = Corpus(directory / CORPUS)  # Index what was written, because a source may change meanwhile.
    progress = tqdm(corpus, desc="Splitting into tokens", total=len(corpus), disable=not show_progress)
    # Ids are in order of appearance, so that they are the same in every run.
    vocabulary: dict[str, int] = {}
    token_ids = [
        [vocabulary.setdefault(token, len(vocabulary)) for token in tokenize(f"{each.title}\n{each.text}")]
        for each in progress
    ]
    if not vocabulary:
        raise CorpusError("corpus: no passage has a letter or digit outside the stop words")
    scorer = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
    scorer.index((token_ids, vocabulary), create_empty_token=False, show_progress=show_progress)
    scorer.save(directory)
    return len(corpus)


def top_k(scores: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.intp]:
    """The indices of the `k` highest scores, best first, equal scores in index order; `scores` is (N,)."""
    kept = np.arange(len(scores))
    if len(scores) > k:
        # Keep all that tie with the k-th highest, so that the sort below decides between them, not chance.
        kept = np.flatnonzero(scores >= np.partition(scores, -k)[-k])
    return kept[np.argsort(-scores[kept], kind="stable")[:k]]


def read_manifest(directory: Path) -> Manifest:
    """Read the `manifest.json` of an index. Raises the errors of `BM25Index.load`."""
    if not directory.exists():
        raise FileNotFoundError(missing("index", directory))
    if not (directory / MANIFEST).is_file():
        raise FileNotFoundError(
            f"index {directory}: there is no {MANIFEST}; choose another folder, or build the index"
        )
    try:
        record = json.loads((directory / MANIFEST).read_bytes())
        version = record["format_version"]
        manifest = Manifest(**record) if version == FORMAT_VERSION else None
    except (ValueError, TypeError, LookupError) as error:
        raise _outdated(directory, f"its {MANIFEST} cannot be read ({error})") from error
    if manifest is None:
        raise _outdated(directory, f"it has version {version}, but must have {FORMAT_VERSION}")
    return manifest


def _outdated(directory: Path, problem: str) -> IndexOutdated:
    return IndexOutdated(f"index {directory}: {problem}; delete the folder to rebuild it, or choose another index")


def fingerprint(path: Path) -> dict[str, str | int]:
    """The `sha256` and size in `bytes` of a file, which is read once, a megabyte at a time."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
        return {"sha256": digest.hexdigest(), "bytes": file.tell()}
