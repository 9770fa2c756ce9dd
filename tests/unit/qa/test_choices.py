from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sorl_trl.qa import normalize_answer
from sorl_trl.qa.choices import named_letter, right_letter

DRUGS = {"A": "Aspirin", "B": "The beta blocker", "C": "Vitamin C", "D": "None of the above"}
SIGNS = {"A": "Rh+", "B": "Rh-", "C": "+", "D": "-"}
BLOOD = {"A": "AB", "B": "A", "C": "C", "D": "0"}
GERMS = {"A": "E. coli", "B": "A. fumigatus", "C": "Hepatitis A", "E": "Hepatitis B"}
REPEATED = {"A": "5 mg", "B": "5 mg", "C": "6 mg", "D": "6 mg."}


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        (" [b] ", "B"),
        ("**B**", "B"),
        ("(b) the beta-blocker", None),  # punctuation vanishes: "betablocker"
        ("a beta blocker", "B"),
        ("a", "A"),
        ("E", None),
        ("E) Aspirin", None),
        ("", None),
        ("?!", None),
        ("A, B", None),
        ("AB", None),
        ("A\nVitamin C", None),
        ("Vitamin C (A)", None),
        ("B because it lowers blood pressure", None),
        ("the answer is B", None),
        ("option b.", "B"),
        ("**Answer:** D", "D"),
        ("Answer: Option B", "B"),
        ("(Choice C)", "C"),
        ("Answer: vitamin c", "C"),
        ("Option A) Vitamin C", None),
        ("Answer A different question", None),
        ("Answer", None),
        ("AnswerB", None),
    ],
)
def test_what_an_answer_names(answer, letter):
    assert named_letter(answer, DRUGS) == letter


@pytest.mark.parametrize(
    ("options", "answer", "letter"),
    [
        (SIGNS, "Rh+", "A"),
        (SIGNS, "B) Rh-", "B"),
        (SIGNS, "A) Rh-", None),
        (SIGNS, "Rh", None),  # both, after normalization
        (SIGNS, "-", "D"),
        (SIGNS, "+/-", None),
        (BLOOD, "A", None),  # the letter of one option, the text of another
        (BLOOD, "C", "C"),  # both its letter and its text
        ({"A": "fib", "B": "A fib"}, "A fib", None),
        (GERMS, "E coli", "A"),
        (GERMS, "A fumigatus", "B"),
        (GERMS, "hepatitis A!", "C"),
        (GERMS, "A) hepatitis A", None),
        (REPEATED, "5 mg", None),
        (REPEATED, "B) 5 mg", "B"),
        (REPEATED, "6 mg.", "D"),
        (REPEATED, "6-mg", None),
        (SIGNS, "Answer: -", "D"),
        ({"A": "Option B", "B": "Choice A"}, "Option B", "A"),  # an option's own words
    ],
)
def test_options_that_are_hard_to_tell_apart(options, answer, letter):
    assert named_letter(answer, options) == letter


def test_the_right_letter():
    assert right_letter(["Vitamin C"], DRUGS) == "C"
    assert right_letter(("6 mg",), REPEATED) == "C"


@pytest.mark.parametrize("golden_answers", [[], ["vitamin C"], ["C"], ["Aspirin", "Vitamin C"], "Aspirin"])
def test_the_golden_answer_must_be_the_text_of_an_option(golden_answers):
    with pytest.raises(ValueError, match="`golden_answers` must be one text, that of exactly one of the options"):
        right_letter(golden_answers, DRUGS)


def test_a_repeated_text_has_no_right_letter():
    with pytest.raises(ValueError, match=r"exactly one of the options .* got \['5 mg'\]"):
        right_letter(["5 mg"], REPEATED)


words = st.sampled_from(["heart", "lung", "of", "the", "left", "type 2", "beta", "X-ray", "(acute)", "Rh+"])
texts = st.lists(words, min_size=2, max_size=4).map(" ".join)
option_lists = st.lists(texts, min_size=2, max_size=5, unique_by=normalize_answer)
SPELLINGS = ["{letter}", "{lower}", "{letter}.", "({letter})", "({lower})", " {letter}) ", "{text}", "{text}."]
SPELLINGS += ["{letter}) {text}", "{letter}: {text}", "{letter}. {text}", "({lower}) {text}", "{letter} {text}"]


@settings(deadline=None)
@given(options=option_lists, spelling=st.sampled_from(SPELLINGS), data=st.data())
def test_every_spelling_names_the_option(options, spelling, data):
    lettered = dict(zip("ABCDE", options, strict=False))
    letter = data.draw(st.sampled_from(sorted(lettered)))
    answer = spelling.format(letter=letter, lower=letter.lower(), text=lettered[letter])
    shuffled = dict(data.draw(st.permutations(list(lettered.items()))))
    assert named_letter(answer, lettered) == named_letter(answer, shuffled) == letter


@settings(deadline=None)
@given(options=option_lists, data=st.data())
def test_a_letter_before_another_options_text_names_nothing(options, data):
    lettered = dict(zip("ABCDE", options, strict=False))
    letter, other = data.draw(st.permutations(sorted(lettered)))[:2]
    assert named_letter(f"{letter}) {lettered[other]}", lettered) is None


@settings(deadline=None)
@given(answer=st.text(alphabet="abAB1 .):(+-\n*'\"é", max_size=8), data=st.data())
def test_the_order_of_options_is_irrelevant_to_any_answer(answer, data):
    options = {"A": "a b", "B": "B+", "C": "b-", "D": "1"}
    shuffled = dict(data.draw(st.permutations(list(options.items()))))
    assert named_letter(answer, options) == named_letter(answer, shuffled)
