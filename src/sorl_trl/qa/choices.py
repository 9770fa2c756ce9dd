"""Multiple choice: which option is right, and which one an answer names.

Options are a mapping from letter to text, in the order in which they are shown. The golden answer is the text of the
right option, so that a search can be credited for finding it; the right letter follows from it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from sorl_trl.qa.answers import normalize_answer

# "B", "b.", "(B)", "B) text", "B: text", "**B**": a letter of its own, and the text after it, which may be empty.
_LETTER_FIRST = re.compile(r"[\s(\[*\"']*([A-Za-z])(?![^\W_])[\s)\].:*\"']*(.*)", re.DOTALL)
# "Answer: B", "Option B", "**Answer:** (B)": words that may come before all of that and name nothing.
_PREFIX = re.compile(r"[\s(\[*\"']*(?:(?:answer|option|choice)\b[\s:.*]*)+", re.IGNORECASE)
# "A) Paris", "Paris (A)": not an article, because no word follows on its line.
_LETTER_A = re.compile(r"\ba\b(?![ \t]+\w)", re.IGNORECASE)


def right_letter(golden_answers: Sequence[str], options: Mapping[str, str]) -> str:
    """Return the letter of the option whose text is the golden answer.

    Raises ValueError unless there is exactly one golden answer, and exactly one option has it as its text.
    """
    letters = [letter for letter, text in options.items() if [text] == list(golden_answers)]
    if len(letters) != 1:
        raise ValueError(
            f"`golden_answers` must be one text, that of exactly one of the options {dict(options)}, "
            f"got {golden_answers!r}"
        )
    return letters[0]


def named_letter(answer: str, options: Mapping[str, str]) -> str | None:
    """Return the letter of the one option that an answer names, or `None` if it names none or more than one.

    An option is named by its letter in either case, bare or with brackets and punctuation ("B", "b.", "(B)"); by its
    text; or by both ("B) text", "B: text"). "Answer", "Option" or "Choice" may come first ("Answer: B", "Option B"),
    unless an option's text begins with them. The whole answer must have this form: a letter before other words names
    nothing, and neither does a sentence ("the answer is B"). A bare letter that is also the text of another option
    names two options, and so does a text that two options share, unless a letter precedes it.

    Texts are compared as by exact match, with two refinements. If it cannot tell two options apart ("Rh+" and "Rh-",
    because punctuation is dropped), an answer that spells one of them out names that one. And an "A" that no word
    follows is a letter, not an article to drop: "A) Paris" is not "Paris".
    """
    named = _named(answer, options)
    if not named and (prefix := _PREFIX.match(answer)):
        named = _named(answer[prefix.end() :], options)
    return named.pop() if len(named) == 1 else None


def _named(answer: str, options: Mapping[str, str]) -> set[str]:
    """The letters of all options that an answer names."""
    named = _named_by_text(answer, options)
    if spelled := _LETTER_FIRST.fullmatch(answer):
        letter, text = spelled[1].upper(), spelled[2]
        if letter in options and (not text or letter in _named_by_text(text, options)):
            named |= {letter}
    return named


def _named_by_text(answer: str, options: Mapping[str, str]) -> set[str]:
    for read in (_spelled_out, _with_letter_a if _LETTER_A.search(answer) else normalize_answer):
        wanted = read(answer)
        named = {letter for letter, text in options.items() if wanted and read(text) == wanted}
        if named:
            return named
    return set()


def _spelled_out(text: str) -> str:
    return " ".join(text.casefold().split())


def _with_letter_a(text: str) -> str:
    """Normalize the text, with a word in place of the letter "A", which normalization would drop."""
    return normalize_answer(_LETTER_A.sub("letter-a", text))
