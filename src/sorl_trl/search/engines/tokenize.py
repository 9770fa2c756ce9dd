"""Splits passages and queries into search tokens."""

from __future__ import annotations

import re
import unicodedata

# Lucene's English list. These words carry no topic and have by far the longest posting lists. In return, a query of
# nothing else, such as "To be or not to be", has no hit.
STOP_WORDS = frozenset(
    """
    a an and are as at be but by for if in into is it no not of on or such that the their then there these they this to
    was will with
    """.split()  # noqa: SIM905 - a list would take a line per word
)

# Scripts written without spaces between words (Han, kana) or with endings joined to words (Hangul): one token each.
_KANA = "\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff"
_CJK = _KANA + "\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff\U00020000-\U0003134f"
# For example, vowels of Indic scripts and Thai: `\w` matches none of them, but words continue after them.
_MARKS = "".join(mark for mark in map(chr, range(0x370, 0x10000)) if unicodedata.category(mark)[0] == "M")
_TOKEN = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+(?:[{_MARKS}]+[^\W_{_CJK}]*)*")
# Marks that writers may omit: accents of Latin, Greek and Cyrillic, points of Hebrew, vowels of Arabic.
_ACCENT = re.compile("[\u0300-\u036f\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u064b-\u065f\u0670]")


def tokenize(text: str) -> list[str]:
    """Split text into tokens: runs of letters and digits, and single CJK characters; no stop words, no stemming.

    Case and accents are folded: "Curaçao" and "CURACAO" give the same token. "U.S." gives "u" and "s". Text without
    letters and digits gives `[]`.
    """
    decomposed = unicodedata.normalize("NFKD", text).casefold()
    # NFKD decomposes Hangul, too. NFC composes it again, so that a syllable is one character.
    folded = unicodedata.normalize("NFC", _ACCENT.sub("", decomposed))
    return [token for token in _TOKEN.findall(folded) if token not in STOP_WORDS]
