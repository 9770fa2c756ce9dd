"""The search engine for millions of passages: tantivy's BM25, on disk, built in memory of a fixed size."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sorl_trl.search.checks import check_request
from sorl_trl.search.corpus import CorpusPaths, corpus_files, read_passages
from sorl_trl.search.engines.manifest import (
    IndexCorrupted,
    Manifest,
    check_manifest,
    fingerprint,
    library_series,
    write_manifest,
)
from sorl_trl.search.engines.saved import HASHED_BYTES, open_or_build, staged
from sorl_trl.search.engines.tokenize import tokenize
from sorl_trl.types import Passage

if TYPE_CHECKING:
    import tantivy

FOLDER = "tantivy"
"""Where tantivy's own files lie in the index directory."""
REQUIRED = (f"{FOLDER}/meta.json",)
HEAP_BYTES = 256 << 20
"""What the writer may hold in memory before it writes a segment."""
TOKENS, PASSAGE, POSITION = "tokens", "passage", "position"


class TantivyIndex:
    """A `SearchBackend` for millions of passages: tantivy's BM25 (k1 = 1.2, b = 0.75, lengths rounded to one byte).

    It searches what `BM25Index` searches, by the same tokens and rules, so that it finds the same passages; only the
    scores differ, and with them the order of passages that are about as good. Passages lie in tantivy's store,
    compressed. Opening takes milliseconds whatever the size, and processes on one machine share its pages.

    Made by `build` or `load`; needs `pip install 'sorl-trl[tantivy]'`.
    """

    thread_safe = True

    engine: ClassVar[str] = "tantivy"

    def __init__(self, index: tantivy.Index, directory: Path, identity: str) -> None:
        self._index = index
        self._directory = directory
        self._identity = identity

    @classmethod
    def build(
        cls, corpus_path: CorpusPaths, index_dir: str | os.PathLike[str], show_progress: bool = True
    ) -> TantivyIndex:
        """Index a corpus into a new directory, and load it; see `BM25Index.build`.

        Raises:
            CorpusError: The corpus is empty or a line is not a passage.
            FileExistsError: There is already something at `index_dir`.
            ImportError: tantivy is not installed.
        """
        _require_tantivy()
        with staged(index_dir) as directory:
            files = corpus_files(corpus_path)
            sources = [fingerprint(file) for file in files]
            num_documents = _write_index(read_passages(files, show_progress), directory / FOLDER)
            manifest = Manifest(cls.engine, library_series("tantivy"), num_documents, sources)
            write_manifest(directory, _index_files(directory), manifest)
        return cls.load(index_dir)

    @classmethod
    def open(cls, corpus_path: CorpusPaths, index_dir: str | os.PathLike[str]) -> TantivyIndex:
        """Load the index of a corpus, and build it first where there is none. This reads the corpus; `load` does not.

        Raises:
            IndexOutdated: The index at `index_dir` was built from another content than the corpus has now.
            CorpusError, ImportError, IndexCorrupted, ValueError: As `build` and `load` do.
        """
        return open_or_build(cls, corpus_path, index_dir)

    @classmethod
    def load(cls, index_dir: str | os.PathLike[str]) -> TantivyIndex:
        """Check the files of an index directory, up to 1 MiB by hash and larger ones by size, and open it.

        Raises:
            FileNotFoundError: There is no such directory.
            ImportError: tantivy is not installed.
            IndexCorrupted: A file is missing, changed, of another version or inconsistent.
            ValueError: Another engine made it.
        """
        _require_tantivy()
        import tantivy

        index_dir = Path(index_dir)
        manifest = check_manifest(index_dir, cls.engine, library_series("tantivy"), REQUIRED, HASHED_BYTES)
        try:
            index = tantivy.Index.open(str(index_dir / FOLDER))
            index.config_reader("manual")  # Nothing is written any more: no thread has to watch the files.
            index.reload()
        except (ValueError, OSError) as error:
            raise IndexCorrupted(index_dir, f"tantivy cannot open it ({error})") from error
        if (found := index.searcher().num_docs) != manifest.num_documents:
            raise IndexCorrupted(index_dir, f"{found} passages, {manifest.num_documents} in the manifest")
        return cls(index, index_dir, manifest.identity)

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        """A copy opens the files itself."""
        return TantivyIndex.load, (self._directory.absolute(),)

    @property
    def identity(self) -> str:
        """See `SavedIndex.identity`."""
        return self._identity

    def __len__(self) -> int:
        return int(self._index.searcher().num_docs)

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See `SearchBackend.search_batch`. Gives fewer than `k` passages, or none, where there are no more hits."""
        check_request(queries, k)
        searcher = self._index.searcher()
        return [self._search(searcher, query, k) for query in queries]

    def _search(self, searcher: tantivy.Searcher, query: str, k: int) -> list[Passage]:
        tokens = sorted(set(tokenize(query)))
        if not tokens:
            return []
        hits = best_hits(searcher, self._any_of(tokens), k)
        return [_read_passage(searcher, address, score) for score, address in hits]

    def _any_of(self, tokens: Sequence[str]) -> tantivy.Query:
        # Never tantivy's query language: what a policy writes is not a program.
        import tantivy

        terms = [tantivy.Query.term_query(self._index.schema, TOKENS, token, "freq") for token in tokens]
        return tantivy.Query.boolean_query([(tantivy.Occur.Should, term) for term in terms])


def best_hits(searcher: tantivy.Searcher, query: tantivy.Query, k: int) -> list[tuple[float, tantivy.DocAddress]]:
    """The `k` best hits; equal scores in the order of the corpus, which is not that of tantivy's segments."""
    size, limit = searcher.num_docs, k
    while True:
        limit = min(2 * limit, size)
        hits = searcher.search(query, limit=limit, count=False).hits
        # Whatever ties with the k-th hit must be among them, so that the sort below decides, not chance.
        if len(hits) < limit or limit == size or hits[-1][0] < hits[k - 1][0]:
            break
    positions = searcher.fast_field_values(POSITION, [address for _, address in hits])
    order = sorted(range(len(hits)), key=lambda i: (-hits[i][0], positions[i]))
    return [hits[i] for i in order[:k]]


def _read_passage(searcher: tantivy.Searcher, address: tantivy.DocAddress, score: float) -> Passage:
    identifier, title, text = json.loads(searcher.doc(address).to_dict()[PASSAGE][0])
    return Passage(identifier, title, text, score)


def _write_index(passages: Iterable[Passage], folder: Path) -> int:
    """Write tantivy's files, and give the number of passages."""
    import tantivy

    folder.mkdir()
    number = 0
    # One thread: cutting text into tokens, in Python, is what takes the time. Leaving the block ends the writer's
    # threads, after an error too: they would go on writing into a folder that is being deleted.
    with tantivy.Index(_schema(), path=str(folder)).writer(heap_size=HEAP_BYTES, num_threads=1) as writer:
        for number, passage in enumerate(passages, start=1):
            document = tantivy.Document()
            document.add_unsigned(POSITION, number)
            document.add_text(TOKENS, " ".join(tokenize(f"{passage.title}\n{passage.text}")))
            document.add_bytes(PASSAGE, json.dumps([passage.id, passage.title, passage.text]).encode())
            writer.add_document(document)
    return number


def _schema() -> tantivy.Schema:
    import tantivy

    builder = tantivy.SchemaBuilder()
    builder.add_unsigned_field(POSITION, fast=True)
    builder.add_text_field(TOKENS, tokenizer_name="whitespace", index_option="freq")
    builder.add_bytes_field(PASSAGE, stored=True)
    return builder.build()


def _index_files(directory: Path) -> list[str]:
    """What tantivy wrote, less its locks, by paths inside the directory."""
    files = [path for path in (directory / FOLDER).iterdir() if path.suffix != ".lock"]
    return [path.relative_to(directory).as_posix() for path in files]


def _require_tantivy() -> None:
    try:
        import tantivy  # noqa: F401
    except ImportError as error:
        raise ImportError("the engine tantivy needs: pip install 'sorl-trl[tantivy]'") from error
