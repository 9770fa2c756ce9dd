"""Splits passages and queries into search tokens."""

from __future__ import annotations

import re
import unicodedata
from itertools import pairwise

from sorl_trl.text import HAN_AND_KANA, SOUTHEAST_ASIAN, SOUTHEAST_ASIAN_LETTER, WITHOUT_WIDTH

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

    A run of Thai, Lao, Khmer or Burmese gives its letters, with their marks, and each two neighbours: a word is not
    marked off, and its letters alone would be found everywhere.

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
