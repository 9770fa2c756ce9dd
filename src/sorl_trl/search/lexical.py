"""Lexical engines: their tokenization, BM25 in memory with bm25s, and BM25 on disk with tantivy."""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
from tqdm.auto import tqdm

from sorl_trl.search.backend import check_request
from sorl_trl.search.index import CORPUS, Corpus, CorpusError, SavedIndex, write_corpus
from sorl_trl.text import HAN_AND_KANA, SOUTHEAST_ASIAN, SOUTHEAST_ASIAN_LETTER, WITHOUT_WIDTH
from sorl_trl.types import Passage

if TYPE_CHECKING:
    import tantivy

_modules: dict[str, Any] = sys.modules
if "jax" in _modules:
    import bm25s
else:  # bm25s starts JAX where it is installed, which takes three quarters of a GPU's memory; nothing here needs it
    _modules["jax"] = None
    import bm25s

    del _modules["jax"]

# Lucene's English list. These words carry no topic and have by far the longest posting lists. In return, a query of
# nothing else, such as "To be or not to be", has no hit.
STOP_WORDS = frozenset(
    """
    a an and are as at be but by for if in into is it no not of on or such that the their then there these they this to
    was will with
    """.split()  # noqa: SIM905 - a list would take a line per word
)

# One token each: Han and kana, which are written without spaces, and Hangul, whose words take endings.
_CJK = HAN_AND_KANA + "\uac00-\ud7a3"
_IN_WORDS = rf"[^\W_{_CJK}{SOUTHEAST_ASIAN}]"
# For example, vowels of Indic scripts: `\w` matches none of them, but words continue after them.
_MARKS = "".join(mark for mark in map(chr, range(0x370, 0x10000)) if unicodedata.category(mark)[0] == "M")
_TOKEN = re.compile(
    rf"[{_CJK}]|(?:{SOUTHEAST_ASIAN_LETTER}[{WITHOUT_WIDTH}]*)+|{_IN_WORDS}+(?:[{_MARKS}]+{_IN_WORDS}*)*"
)
_LETTER = re.compile(SOUTHEAST_ASIAN_LETTER)
# Marks that writers may omit: accents of Latin, Greek and Cyrillic, points of Hebrew, vowels of Arabic.
_ACCENT = re.compile("[\u0300-\u036f\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u064b-\u065f\u0670]")


def tokenize(text: str) -> list[str]:
    """Split text into tokens: runs of letters and digits, and single CJK characters; no stop words, no stemming.

    A run of Thai, Lao, Khmer or Burmese gives its letters, with their marks, and each pair of neighbours, because
    words are not delimited and single letters occur everywhere.

    Case and accents are folded: "Curaçao" and "CURACAO" give the same token. "U.S." gives "u" and "s". Text without
    letters and digits gives `[]`.
    """
    decomposed = unicodedata.normalize("NFKD", text).casefold()
    # NFKD decomposes Hangul, too. NFC composes it again, so that a syllable is one character.
    folded = unicodedata.normalize("NFC", _ACCENT.sub("", decomposed))
    tokens = _TOKEN.findall(folded)
    if _LETTER.search(folded):
        tokens = [token for run in tokens for token in _letters_and_pairs(run)]
    return [token for token in tokens if token not in STOP_WORDS]


def _letters_and_pairs(run: str) -> list[str]:
    letters = _LETTER.findall(run)
    return [*letters, *map("".join, pairwise(letters))] or [run]


def _passage_tokens(passage: Passage) -> list[str]:
    return tokenize(f"{passage.title}\n{passage.text}")


class BM25Index(SavedIndex):
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

    engine: ClassVar[str] = "bm25"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._scorer = bm25s.BM25.load(directory, mmap=True, allow_pickle=False)
        self._corpus = Corpus(directory / CORPUS)

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        check_request(queries, k)
        return [self._search(query, k) for query in queries]

    def _search(self, query: str, k: int) -> list[Passage]:
        vocabulary = self._scorer.vocab_dict
        scores = self._scorer.get_scores_from_ids(sorted({vocabulary[t] for t in tokenize(query) if t in vocabulary}))
        hits = np.flatnonzero(scores)
        best = hits[top_k(scores[hits], k)]
        return [replace(self._corpus[index], score=scores.item(index)) for index in best.tolist()]

    @staticmethod
    def _write(passages: Iterable[Passage], directory: Path, show_progress: bool) -> int:
        write_corpus(passages, directory / CORPUS)
        corpus = Corpus(directory / CORPUS)  # Index what was written, because a source may change meanwhile.
        progress = tqdm(corpus, desc="Splitting into tokens", total=len(corpus), disable=not show_progress)
        # Ids are in order of appearance, so that they are the same in every run.
        vocabulary: dict[str, int] = {}
        token_ids = [[vocabulary.setdefault(t, len(vocabulary)) for t in _passage_tokens(each)] for each in progress]
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


FOLDER = "tantivy"
"""The folder of tantivy's own files in the index folder."""
HEAP_BYTES = 256 << 20
"""How many bytes the writer may buffer before it writes a segment."""
TOKENS, PASSAGE = "tokens", "passage"


class TantivyIndex(SavedIndex):
    """A `SearchBackend` for millions of passages: tantivy's BM25 (k1 = 1.2, b = 0.75, lengths rounded to one byte).

    It uses the same tokens and rules as `BM25Index`, so it finds the same passages. Only scores differ, and thus the
    order of passages with similar scores; the order is the same in every search of one index. Passages are compressed
    in tantivy's store. Opening takes milliseconds at any size, and processes on one machine share its pages. Building
    takes a buffer of fixed size.

    Make it with `build` or `load`; it needs `pip install 'sorl-trl[tantivy]'`.
    """

    engine: ClassVar[str] = "tantivy"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        tantivy = _tantivy()
        self._index = tantivy.Index.open(str(directory / FOLDER))
        self._index.config_reader("manual")  # The files never change, so no thread needs to watch them.
        self._index.reload()

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
        found: list[Passage] = []
        for score, address in searcher.search(any_of, limit=min(k, searcher.num_docs), count=False).hits:
            identifier, title, text = json.loads(searcher.doc(address).to_dict()[PASSAGE][0])
            found.append(Passage(identifier, title, text, score))
        return found

    @staticmethod
    def _write(passages: Iterable[Passage], directory: Path, show_progress: bool) -> int:
        tantivy = _tantivy()
        folder, number = directory / FOLDER, 0
        folder.mkdir()
        builder = tantivy.SchemaBuilder()
        builder.add_text_field(TOKENS, tokenizer_name="whitespace", index_option="freq")
        builder.add_bytes_field(PASSAGE, stored=True)
        # One thread is enough, because splitting text into tokens in Python takes most of the time. Leaving the block
        # ends the writer's threads, even after an error: they would go on writing into a folder that is being deleted.
        with tantivy.Index(builder.build(), path=str(folder)).writer(heap_size=HEAP_BYTES, num_threads=1) as writer:
            for passage in passages:
                number += 1
                document = tantivy.Document()
                document.add_text(TOKENS, " ".join(_passage_tokens(passage)))
                document.add_bytes(PASSAGE, json.dumps([passage.id, passage.title, passage.text]).encode())
                writer.add_document(document)
        return number


def _tantivy() -> ModuleType:
    try:
        import tantivy
    except ImportError as error:
        raise ImportError("the engine tantivy needs: pip install 'sorl-trl[tantivy]'") from error
    return tantivy
