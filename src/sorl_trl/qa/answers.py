"""Exact match, sub-exact match and token F1 of an answer, as SQuAD defines them and FlashRAG computes them."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from operator import eq

from sorl_trl.text import HAN_AND_KANA, SOUTHEAST_ASIAN_LETTER, WITHOUT_WIDTH

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_PUNCTUATION = [each for each in map(chr, range(0x10000)) if unicodedata.category(each)[0] == "P"]
_SPACES_FOR_PUNCTUATION = str.maketrans(dict.fromkeys([*string.punctuation, *_PUNCTUATION], " "))
_UNSPACED = re.compile(f"({SOUTHEAST_ASIAN_LETTER}|[{HAN_AND_KANA}][\u3099\u309a]?)[{WITHOUT_WIDTH}]*")
# Sharing a word with one of these proves nothing: "no" is not half right for "no one".
_WHOLE_ANSWERS = frozenset({"yes", "no", "noanswer"})


def normalize_answer(text: str) -> str:
    """Normalize as SQuAD does: lower case, no ASCII punctuation, no a, an or the, white space collapsed.

    Unlike in SQuAD, a text that consists only of articles keeps them. Otherwise it would become empty, and the answers
    "The" and "an" to a question about the letter "A" would be right.
    """
    words = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", words).split() or words.split())


def exact_match(prediction: str | None, golden_answers: Sequence[str]) -> float:
    """Return 1.0 if the prediction equals a golden answer after normalization, else 0.0. `None` is no answer: 0.0.

    As in SQuAD's script, which published scores use, ’ is not ', and a letter with a combining accent is not the
    letter with its accent in one character.

    Raises:
        ValueError: `golden_answers` is empty or a plain string.
    """
    return float(_best(eq, prediction, golden_answers))


def sub_exact_match(prediction: str | None, golden_answers: Sequence[str]) -> float:
    """Return 1.0 if the prediction contains a golden answer as whole words, else 0.0. `None` is no answer: 0.0.

    Punctuation may separate words, as in `contains_answer` ("Paris/Rome" contains "Rome"), or vanish, as in
    `exact_match` ("the US" contains "U.S."), so the score is never below exact match. In scripts without spaces,
    every character is a word.

    Raises:
        ValueError: `golden_answers` is empty or a plain string.
    """
    separated = contains_answer(prediction or "", golden_answers)
    return max(float(separated), _best(_contains, prediction, golden_answers))


def token_f1(prediction: str | None, golden_answers: Sequence[str]) -> float:
    """Return the F1, in [0, 1], of the words that prediction and golden answer share, the best over golden answers.

    Words are counted with repetition after normalization, in any order. In scripts without spaces, every character is
    a word, and punctuation is none, as in the scores of CMRC 2018 and MLQA for Chinese. If either side is "yes", "no"
    or "noanswer", the other must be the same (FlashRAG's rule). `None` is no answer: 0.0.

    Raises:
        ValueError: `golden_answers` is empty or a plain string.
    """
    return _best(_f1, prediction, golden_answers)


def contains_answer(text: str, golden_answers: Sequence[str]) -> bool:
    """Tell whether the text contains a golden answer as whole words, both normalized: "know" does not contain "no".

    Punctuation of any script separates words here, on both sides, instead of vanishing: "<b>Paris</b>" contains
    "Paris", and "O’Brien" contains "O'Brien". In Chinese, Japanese, Thai, Lao, Khmer and Burmese, which put no spaces
    between words, every character with its marks is a word.

    Raises:
        ValueError: `golden_answers` is empty or a plain string.
    """
    _check_golden_answers(golden_answers)
    return _best(_contains, _separate(text), [_separate(gold) for gold in golden_answers]) > 0


def _best(compare: Callable[[str, str], float], prediction: str | None, golden_answers: Sequence[str]) -> float:
    """The highest `compare(prediction, golden answer)`, both normalized; an empty prediction is never right."""
    _check_golden_answers(golden_answers)
    normalized = normalize_answer(prediction or "")
    if not normalized:
        return 0.0
    return max(compare(normalized, normalize_answer(gold)) for gold in golden_answers)


def _check_golden_answers(golden_answers: Sequence[str]) -> None:
    if isinstance(golden_answers, str) or not golden_answers:
        raise ValueError(f"golden_answers must be a non-empty list of strings, got {golden_answers!r}")


def _separate(text: str) -> str:
    return unicodedata.normalize("NFC", text).translate(_SPACES_FOR_PUNCTUATION)


def _words(normalized: str) -> list[str]:
    """The words of a normalized text; if it has characters of a script without spaces, each of them is one."""
    if not _UNSPACED.search(normalized):
        return normalized.split()
    return _UNSPACED.sub(r" \1 ", _separate(normalized)).split()


def _contains(text: str, gold: str) -> float:
    return float(f" {' '.join(_words(gold))} " in f" {' '.join(_words(text))} ")


def _f1(prediction: str, gold: str) -> float:
    if prediction != gold and not _WHOLE_ANSWERS.isdisjoint((prediction, gold)):
        return 0.0
    predicted, expected = _words(prediction), _words(gold)
    shared = (Counter(predicted) & Counter(expected)).total()
    # 2PR / (P + R) with P = shared / predicted and R = shared / expected.
    return 2 * shared / (len(predicted) + len(expected))
