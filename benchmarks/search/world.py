"""Invented passages and queries for `benchmarks.search`: no download, and the same ones everywhere.

A vocabulary of 200,000 words is drawn from by the law of Zipf and Mandelbrot: the word of rank r = 1, 2, … has a
probability in proportion to 1 / (r + 2.7). The stop words of the package have the first ranks, as they have in
English, and make up about a fifth of the text; all other words are syllables strung together. A passage has 60 to 140
words (uniform, 100 on average), each drawn by itself: unlike in real text no word is the more likely for having been
used before. Nothing in it is about anything, so that it tells how fast an engine is and not how good.

A query has 2 to 8 words (uniform) of one passage, of one of three kinds in turn:

- `span`: words that follow each other, stop words among them, as a policy that copies what it has read;
- `words`: words from all over the passage without stop words, as a policy that strings keywords together;
- `rare`: the rarest words of the passage, as a question that names its entities.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from sorl_trl.search.lexical import STOP_WORDS
from sorl_trl.types import Passage

SEED = 0
VOCABULARY = 200_000
SHIFT = 2.7
SHORTEST, LONGEST = 60, 140
KINDS = ("span", "words", "rare")
SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnpqrstvwxz" for vowel in "aeiou"]

Ranks = npt.NDArray[np.int64]


class World:
    """Passages as ranks of words, in the order of their numbers."""

    def __init__(self, passages: int) -> None:
        """Draw so many passages, from a fixed seed."""
        generator = np.random.default_rng(SEED)
        lengths = generator.integers(SHORTEST, LONGEST + 1, passages)
        cumulative = np.cumsum(1 / (np.arange(1, VOCABULARY + 1) + SHIFT))
        draws = generator.random(int(lengths.sum())) * cumulative[-1]
        self._ranks: list[Ranks] = np.split(np.searchsorted(cumulative, draws, side="right"), np.cumsum(lengths)[:-1])
        self._words = [*sorted(STOP_WORDS), *(_word(number) for number in range(VOCABULARY - len(STOP_WORDS)))]

    def passages(self) -> Iterator[Passage]:
        """Every passage, untitled; its id is its number, from 0."""
        return (Passage(str(number), "", self._text(ranks)) for number, ranks in enumerate(self._ranks))

    def queries(self, number: int) -> list[str]:
        """So many queries, from a fixed seed, the kinds in turn."""
        generator = np.random.default_rng(SEED + 1)
        return [self._query(generator, KINDS[i % len(KINDS)]) for i in range(number)]

    def _query(self, generator: np.random.Generator, kind: str) -> str:
        ranks = self._ranks[generator.integers(len(self._ranks))]
        length = int(generator.integers(2, 9))
        if kind == "span":
            start = generator.integers(len(ranks) - length + 1)
            return self._text(ranks[start : start + length])
        content = np.unique(ranks[ranks >= len(STOP_WORDS)])  # sorted: the rarest are the last
        return self._text(content[-length:] if kind == "rare" else generator.permutation(content)[:length])

    def _text(self, ranks: Ranks) -> str:
        return " ".join([self._words[rank] for rank in ranks])


def _word(number: int) -> str:
    """Two syllables or more, no two numbers alike."""
    number += len(SYLLABLES)
    word = ""
    while number:
        number, digit = divmod(number, len(SYLLABLES))
        word = SYLLABLES[digit] + word
    return word
