"""Exact match, sub-exact match and token F1 of an answer, as SQuAD defines them and FlashRAG computes them."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from operator import eq

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SPACES_FOR_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))
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

    Raises:
        ValueError: `golden_answers` is empty or a plain string.
    """
    return float(_best(eq, prediction, golden_answers))


def sub_exact_match(prediction: str | None, golden_answers: Sequence[str]) -> float:
    """Return 1.0 if the prediction contains a golden answer as whole words, else 0.0. `None` is no answer: 0.0.

    Punctuation may separate words, as in `contains_answer` ("Paris/Rome" contains "Rome"), or vanish, as in
    `exact_match` ("the US" contains "U.S."), so the score is never below exact match.

    Raises:
        ValueError: `golden_answers` is empty or a plain string.
    """
    separated = contains_answer(prediction or "", golden_answers)
    return max(float(separated), _best(_contains, prediction, golden_answers))


def token_f1(prediction: str | None, golden_answers: Sequence[str]) -> float:
    """Return the F1, in [0, 1], of the words that prediction and golden answer share, the best over golden answers.

    Words are counted with repetition after normalization, in any order. If either side is "yes", "no" or "noanswer",
    the other must be the same (FlashRAG's rule). `None` is no answer: 0.0.

    Raises:
        ValueError: `golden_answers` is empty or a plain string.
    """
    return _best(_f1, prediction, golden_answers)


def contains_answer(text: str, golden_answers: Sequence[str]) -> bool:
    """Tell whether the text contains a golden answer as whole words, both normalized: "know" does not contain "no".

    Punctuation separates words here, on both sides, instead of vanishing: "<b>Paris</b>" contains "Paris".

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
    return text.translate(_SPACES_FOR_PUNCTUATION)


def _contains(text: str, gold: str) -> float:
    return float(f" {gold} " in f" {text} ")


def _f1(prediction: str, gold: str) -> float:
    if prediction != gold and not _WHOLE_ANSWERS.isdisjoint((prediction, gold)):
        return 0.0
    predicted, expected = prediction.split(), gold.split()
    shared = (Counter(predicted) & Counter(expected)).total()
    # 2PR / (P + R) with P = shared / predicted and R = shared / expected.
    return 2 * shared / (len(predicted) + len(expected))
