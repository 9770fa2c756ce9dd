"""tantivy's BM25 for millions of passages, on disk, built with a fixed amount of memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from sorl_trl.search.backend import check_request
from sorl_trl.search.engines.saved import IndexCorrupted, Manifest, SavedIndex, read_manifest
from sorl_trl.search.engines.tokenize import tokenize
from sorl_trl.types import Passage

if TYPE_CHECKING:
    import tantivy

FOLDER = "tantivy"
"""The folder of tantivy's own files in the index folder."""
HEAP_BYTES = 256 << 20
"""How much the writer may hold in memory before it writes a segment."""
TOKENS, PASSAGE, POSITION = "tokens", "passage", "position"


class TantivyIndex(SavedIndex):
    """A `SearchBackend` for millions of passages: tantivy's BM25 (k1 = 1.2, b = 0.75, lengths rounded to one byte).

    It uses the same tokens and rules as `BM25Index`, so it finds the same passages; only their scores differ, and the
    order of passages that are about as good. Passages are compressed in tantivy's store. Opening takes milliseconds at
    any size, and processes on one machine share its pages.

    Make it with `build` or `load`; it needs `pip install 'sorl-trl[tantivy]'`.
    """

    engine: ClassVar[str] = "tantivy"

    def __init__(self, index: tantivy.Index, manifest: Manifest) -> None:
        super().__init__(manifest)
        self._index = index

    @classmethod
    def load(cls, index_dir: str | os.PathLike[str]) -> TantivyIndex:
        tantivy = _tantivy()
        manifest = read_manifest(Path(index_dir), cls.engine)
        try:
            index = tantivy.Index.open(str(Path(index_dir) / FOLDER))
            index.config_reader("manual")  # The files never change, so no thread needs to watch them.
            index.reload()
        except (ValueError, OSError) as error:
            raise IndexCorrupted(Path(index_dir), f"tantivy cannot open it ({error})") from error
        return cls(index, manifest)

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        check_request(queries, k)
        searcher = self._index.searcher()
        return [self._search(searcher, query, k) for query in queries]

    def _search(self, searcher: tantivy.Searcher, query: str, k: int) -> list[Passage]:
        tantivy = _tantivy()
        tokens = sorted(set(tokenize(query)))
        if not tokens:
            return []
        # Do not use tantivy's query language: what a policy writes is not a program.
        terms = [tantivy.Query.term_query(self._index.schema, TOKENS, token, "freq") for token in tokens]
        any_of = tantivy.Query.boolean_query([(tantivy.Occur.Should, term) for term in terms])
        return [_read_passage(searcher, address, score) for score, address in best_hits(searcher, any_of, k)]

    @staticmethod
    def _write(passages: Iterable[Passage], directory: Path, show_progress: bool) -> int:
        """See `SavedIndex.build`. Memory stays within a buffer of fixed size."""
        tantivy = _tantivy()
        folder, number = directory / FOLDER, 0
        folder.mkdir()
        # One thread is enough, because splitting text into tokens in Python takes most of the time. Leaving the block
        # ends the writer's threads, even after an error: they would go on writing into a folder that is being deleted.
        with tantivy.Index(_schema(), path=str(folder)).writer(heap_size=HEAP_BYTES, num_threads=1) as writer:
            for number, passage in enumerate(passages, start=1):
                document = tantivy.Document()
                document.add_unsigned(POSITION, number)
                document.add_text(TOKENS, " ".join(tokenize(f"{passage.title}\n{passage.text}")))
                document.add_bytes(PASSAGE, json.dumps([passage.id, passage.title, passage.text]).encode())
                writer.add_document(document)
        return number


def best_hits(searcher: tantivy.Searcher, query: tantivy.Query, k: int) -> list[tuple[float, tantivy.DocAddress]]:
    """The `k` best hits, with equal scores in the order of the corpus instead of tantivy's segments."""
    size, limit = searcher.num_docs, k
    while True:
        limit = min(2 * limit, size)
        hits = searcher.search(query, limit=limit, count=False).hits
        # All that tie with the k-th hit must be among them, so that the sort below decides, not chance.
        if len(hits) < limit or limit == size or hits[-1][0] < hits[k - 1][0]:
            break
    positions = searcher.fast_field_values(POSITION, [address for _, address in hits])
    order = sorted(range(len(hits)), key=lambda i: (-hits[i][0], positions[i]))
    return [hits[i] for i in order[:k]]


def _read_passage(searcher: tantivy.Searcher, address: tantivy.DocAddress, score: float) -> Passage:
    identifier, title, text = json.loads(searcher.doc(address).to_dict()[PASSAGE][0])
    return Passage(identifier, title, text, score)


def _schema() -> Any:
    builder = _tantivy().SchemaBuilder()
    builder.add_unsigned_field(POSITION, fast=True)
    builder.add_text_field(TOKENS, tokenizer_name="whitespace", index_option="freq")
    builder.add_bytes_field(PASSAGE, stored=True)
    return builder.build()


def _tantivy() -> ModuleType:
    try:
        import tantivy
    except ImportError as error:
        raise ImportError("the engine tantivy needs: pip install 'sorl-trl[tantivy]'") from error
    return tantivy
