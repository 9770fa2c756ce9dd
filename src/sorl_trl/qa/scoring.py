"""The one scorer of rewards and evaluation: answers, multiple choice, and trajectories; and the reward functions.

Exact match, sub-exact match and token F1 are as SQuAD defines them and FlashRAG computes them. Multiple-choice options
are a mapping from letter to text, in display order. The golden answer is the text of the right option, so that a
passage can contain it; it determines the right letter.

Only text that the policy generated is graded (`Trajectory.answer`): a passage with `<answer>` tags earns nothing.

TRL's trainers call a reward function by keyword with one entry per trajectory. It uses the columns that its parameters
name and ignores the rest: `trajectory` comes from the rollout, other columns from the training set made by
`build_prompt_rows`. A trajectory ended by an infrastructure failure gets `None`, and TRL leaves it out.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import eq
from typing import Any, TypeVar

from sorl_trl.types import Trajectory

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_PUNCTUATION = [each for each in map(chr, range(0x10000)) if unicodedata.category(each)[0] == "P"]
_SPACES_FOR_PUNCTUATION = str.maketrans(dict.fromkeys([*string.punctuation, *_PUNCTUATION], " "))

# Sharing a word with one of these proves nothing: "no" is not half right for "no one".
_WHOLE_ANSWERS = frozenset({"yes", "no", "noanswer"})

# "B", "b.", "(B)", "**B**", "Answer: B", "Option B", and "B) text": a letter, and the text after it.
_MARKED = re.compile(
    r"[\s*(\[\"']*(?:(?:answer|option|choice)[\s:*]+)*[(\[\"']*([A-Z])(?:[)\].:*\"']+\s*(.*)|\s*)",
    re.IGNORECASE | re.DOTALL,
)


def normalize_answer(text: str) -> str:
    """Normalize as SQuAD does: lower case, no ASCII punctuation, no a, an or the, white space collapsed.

    Unlike in SQuAD, a text that consists only of articles keeps them. Otherwise it would become empty, and the answers
    "The" and "an" to a question about the letter "A" would be right.
    """
    words = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", words).split() or words.split())


def exact_match(prediction: str | None, golden_answers: Sequence[str]) -> float:
    """Return 1.0 if the prediction equals a golden answer after normalization, else 0.0. `None` is no answer: 0.0.

    As in SQuAD's script, which published scores use, ’ differs from ', and a letter with a combining accent differs
    from the precomposed character.

    Raises:
        ValueError: `golden_answers` is empty or a plain string.
    """
    return float(_best(eq, prediction, golden_answers))


def sub_exact_match(prediction: str | None, golden_answers: Sequence[str]) -> float:
    """Return 1.0 if the prediction contains a golden answer as whole words, else 0.0. `None` is no answer: 0.0.

    Words are compared as by `contains_answer`, and the score is never below exact match.

    Raises:
        ValueError: `golden_answers` is empty or a plain string.
    """
    return max(float(contains_answer(prediction or "", golden_answers)), exact_match(prediction, golden_answers))


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

    Punctuation of any script separates words here, on both sides, instead of being removed: "<b>Paris</b>" contains
    "Paris", and "O’Brien" contains "O'Brien". Text that is written without spaces is one word.

    Raises:
        ValueError: `golden_answers` is empty or a plain string.
    """
    _check_golden_answers(golden_answers)
    words = f" {_separated(text)} "
    golds = filter(None, map(_separated, golden_answers))
    return any(f" {gold} " in words for gold in golds)


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


def _separated(text: str) -> str:
    """The words of a text, normalized, with a space between two."""
    return normalize_answer(unicodedata.normalize("NFC", text).translate(_SPACES_FOR_PUNCTUATION))


def _f1(prediction: str, gold: str) -> float:
    if prediction != gold and not _WHOLE_ANSWERS.isdisjoint((prediction, gold)):
        return 0.0
    predicted, expected = prediction.split(), gold.split()
    shared = (Counter(predicted) & Counter(expected)).total()
    # 2PR / (P + R) with P = shared / predicted and R = shared / expected.
    return 2 * shared / (len(predicted) + len(expected))


def right_letter(golden_answers: Sequence[str], options: Mapping[str, str]) -> str:
    """Return the letter of the option that has the golden answer as its text.

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

    An option is named by its letter in either case, bare or marked ("B", "b.", "(B)", "Answer: B"), also before its
    own text ("B) text"); or by its text, verbatim or else after normalization. A sentence names no option.
    """
    marked = _MARKED.fullmatch(answer)
    letter, rest = (marked[1].upper(), marked[2] or "") if marked else ("", "")
    if letter in options and not rest:
        return letter
    named = _with_text(answer, options, _spelled_out)
    if not named and letter in options:
        return letter if letter in _with_text(rest, options, normalize_answer) else None
    named = named or _with_text(answer, options, normalize_answer)
    return named[0] if len(named) == 1 else None


def _with_text(text: str, options: Mapping[str, str], read: Callable[[str], str]) -> list[str]:
    """The letters of the options with this text, where `read` makes both comparable."""
    wanted = read(text)
    return [letter for letter, option in options.items() if wanted and read(option) == wanted]


def _spelled_out(text: str) -> str:
    return " ".join(text.casefold().split())


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


Score = TypeVar("Score")
Trajectories = Sequence[Trajectory]
Answers = Sequence[Sequence[str]]
OptionPairs = Sequence[tuple[str, str]]
"""Letter and text of each option; empty for an open question. A dataset turns the pairs into lists."""


def exact_match_reward(*, trajectory: Trajectories, golden_answers: Answers, **_: object) -> list[float | None]:
    """Give 1.0 for an answer that equals a golden answer after normalization, else 0.0."""
    return _score_each(lambda each, golden: exact_match(each.answer, golden), trajectory, golden_answers)


def f1_reward(*, trajectory: Trajectories, golden_answers: Answers, **_: object) -> list[float | None]:
    """Give the best token F1 of the answer with a golden answer, in [0, 1]."""
    return _score_each(lambda each, golden: token_f1(each.answer, golden), trajectory, golden_answers)


def answer_reward(
    *,
    trajectory: Trajectories,
    golden_answers: Answers,
    options: Sequence[OptionPairs | None] | None = None,
    **_: object,
) -> list[float | None]:
    """Give choice accuracy for questions with options and exact match for open ones, for mixed sets."""
    columns = [None] * len(trajectory) if options is None else options
    return _score_each(score_answer, trajectory, golden_answers, _mappings(columns))


def environment_reward(*, trajectory: Trajectories, **_: object) -> list[list[float] | None]:
    """Give each turn its environment's reward (`Reply.reward`), or 0.0 if it gave none."""
    return _score_each(lambda each: [turn.reward or 0.0 for turn in each.turns], trajectory)


def solved_reward(*, trajectory: Trajectories, environments: Sequence[Any], **_: object) -> list[float | None]:
    """Give 1.0 if the environment's attribute `solved` is true, else 0.0."""
    return _score_each(lambda _, environment: float(environment.solved), trajectory, environments)


REWARDS: dict[str, Callable[..., list[Any]]] = {
    "answer": answer_reward,
    "exact_match": exact_match_reward,
    "f1": f1_reward,
    "environment": environment_reward,
    "solved": solved_reward,
}
"""The reward functions, by their names in recipes."""
TASK_REWARDS = frozenset({"environment", "solved"})
"""The names of the rewards that an environment computes."""


def _score_each(
    score: Callable[..., Score], trajectories: Sequence[Trajectory], *columns: Iterable[object]
) -> list[Score | None]:
    return [
        None if trajectory.stop_reason.is_infrastructure_failure else score(trajectory, *row)
        for trajectory, *row in zip(trajectories, *columns, strict=True)
    ]


def _mappings(options: Sequence[OptionPairs | None]) -> list[dict[str, str]]:
    """Turn pairs into mappings. `None` comes from joining datasets with and without the column."""
    return [dict(pairs or ()) for pairs in options]
