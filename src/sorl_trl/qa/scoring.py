"""The one scorer of rewards and evaluation: answers, multiple choice, and trajectories.

Exact match, sub-exact match and token F1 are as SQuAD defines them and FlashRAG computes them. Options of multiple
choice are a mapping from letter to text, in the order in which they are shown. Their golden answer is the text of the
right option, so that a search can be credited for finding it; the right letter follows from it.

Only text that the policy generated is graded (`Trajectory.answer`): a passage with `<answer>` tags earns nothing.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from operator import eq

from sorl_trl.text import HAN_AND_KANA, SOUTHEAST_ASIAN_LETTER, WITHOUT_WIDTH
from sorl_trl.types import ActionKind, Observation, Trajectory, Turn

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_PUNCTUATION = [each for each in map(chr, range(0x10000)) if unicodedata.category(each)[0] == "P"]
_SPACES_FOR_PUNCTUATION = str.maketrans(dict.fromkeys([*string.punctuation, *_PUNCTUATION], " "))
_UNSPACED = re.compile(f"({SOUTHEAST_ASIAN_LETTER}|[{HAN_AND_KANA}][\u3099\u309a]?)[{WITHOUT_WIDTH}]*")
# Sharing a word with one of these proves nothing: "no" is not half right for "no one".
_WHOLE_ANSWERS = frozenset({"yes", "no", "noanswer"})
# Nearly every passage contains a "no".
_VERDICTS = frozenset({"yes", "no", "maybe"})

# "B", "b.", "(B)", "B) text", "B: text", "**B**": a letter of its own, and the text after it, which may be empty.
_LETTER_FIRST = re.compile(r"[\s(\[*\"']*([A-Za-z])(?![^\W_])[\s)\].:*\"']*(.*)", re.DOTALL)
# "Answer: B", "Option B", "**Answer:** (B)": words that may come before all of that and name nothing.
_PREFIX = re.compile(r"[\s(\[*\"']*(?:(?:answer|option|choice)\b[\s:.*]*)+", re.IGNORECASE)
# "A) Paris", "Paris (A)": not an article, because no word follows on its line.
_LETTER_A = re.compile(r"\ba\b(?![ \t]+\w)", re.IGNORECASE)


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


def score_f1_plus(trajectory: Trajectory, golden_answers: Sequence[str]) -> float:
    """Score F1+ = F1 − 0.1·[no search] − 0.1·[no answer], in [−0.2, 1].

    This is the reward of Search-R1++ (arXiv 2602.19526), known to us second-hand. F1 alone gives 0 both to a wrong
    answer and to none, so a policy loses nothing by not answering; here a wrong answer is worth more than none. A
    search that found nothing or was refused counts as a search; a call of another tool does not.
    """
    has_searched = any(turn.action.kind is ActionKind.SEARCH for turn in trajectory.turns)
    missing = (not has_searched) + (trajectory.answer is None)
    return token_f1(trajectory.answer, golden_answers) - 0.1 * missing


def score_choice(trajectory: Trajectory, golden_answers: Sequence[str], options: Mapping[str, str]) -> float:
    """Score 1.0 if the answer names the right option and no other, by letter or text (`named_letter`), else 0.0.

    There is one golden answer, the text of the right option; `options` maps letters to texts.

    Raises:
        ValueError: The golden answer is not the text of exactly one option, as for an open question.
    """
    right = right_letter(golden_answers, options)
    return float(named_letter(trajectory.answer or "", options) == right)


def score_answer(trajectory: Trajectory, golden_answers: Sequence[str], options: Mapping[str, str]) -> float:
    """Score 1.0 for a right answer: by `score_choice` if there are options, else by `exact_match`."""
    if options:
        return score_choice(trajectory, golden_answers, options)
    return exact_match(trajectory.answer, golden_answers)


def score_search_hits(trajectory: Trajectory, golden_answers: Sequence[str]) -> list[float]:
    """Score each turn: 1.0 for the first search that found a golden answer, else 0.0.

    Only the first counts, or repeating one good search would pay more than answering. The golden answer must occur, as
    whole words (`contains_answer`), both in a passage and in the text of the observation right after the turn, because
    the passage may have been cut, and the text has its own words ("Doc 1"). "yes", "no" and "maybe" never count.
    """
    segments = trajectory.segments
    hits = [
        _is_search_hit(segment, following, golden_answers)
        for segment, following in zip_longest(segments, segments[1:])
        if isinstance(segment, Turn)
    ]
    return [float(hit and not any(hits[:turn])) for turn, hit in enumerate(hits)]


def _is_search_hit(turn: Turn, following: Turn | Observation | None, golden_answers: Sequence[str]) -> bool:
    if turn.action.kind is not ActionKind.SEARCH or not isinstance(following, Observation):
        return False
    texts = [f"{passage.title}\n{passage.text}" for passage in following.passages]
    telling = [gold for gold in golden_answers if normalize_answer(gold) not in _VERDICTS]
    found = [gold for gold in telling if any(contains_answer(text, [gold]) for text in texts)]
    return bool(found) and contains_answer(following.text, found)
