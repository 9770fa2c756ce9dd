from __future__ import annotations

import re
import string
from collections import Counter

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sorl_trl.qa import contains_answer, exact_match, normalize_answer, sub_exact_match, token_f1


def squad_normalize(text):
    """The normalization of SQuAD's evaluation script, as Search-R1 and FlashRAG have it."""
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def squad_f1(prediction, gold):
    predicted, expected = squad_normalize(prediction).split(), squad_normalize(gold).split()
    shared = sum((Counter(predicted) & Counter(expected)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(expected)
    return 2 * precision * recall / (precision + recall)


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        ("The Eiffel  Tower!", "eiffel tower"),
        ("a.b-c", "abc"),
        ("another theme", "another theme"),
        ("\n New\tYork ", "new york"),
        ("Curaçao", "curaçao"),
        ("", ""),
        ("The", "the"),
        ("(A)", "a"),
    ],
)
def test_normalization(text, normalized):
    assert normalize_answer(text) == normalized


@settings(deadline=None)
@given(st.text())
def test_normalization_is_squads_but_for_bare_articles(text):
    assume(squad_normalize(text))
    assert normalize_answer(text) == squad_normalize(text)


@pytest.mark.parametrize(
    ("prediction", "golden_answers", "score"),
    [
        ("the paris.", ["Paris"], 1.0),
        ("Paris", ["Rome", "Paris"], 1.0),
        ("Paris, France", ["Paris"], 0.0),
        (None, ["Paris"], 0.0),
        ("?!", ["..."], 0.0),
        ("The", ["A"], 0.0),
        ("A", ["A"], 1.0),
        ("O’Brien", ["O'Brien"], 0.0),  # as in SQuAD's script, like the two below
        ("cafe\u0301", ["café"], 0.0),
        ("东京。", ["东京"], 0.0),
    ],
)
def test_exact_match(prediction, golden_answers, score):
    assert exact_match(prediction, golden_answers) == score


@pytest.mark.parametrize(
    ("prediction", "golden_answers", "score"),
    [
        ("Barack Obama", ["the president Barack Obama"], 0.8),  # P = 2/2, R = 2/3
        ("x x y", ["x y y"], 2 / 3),  # two words shared, counted with repetition: P = R = 2/3
        ("Paris", ["Rome"], 0.0),
        ("no", ["no one"], 0.0),
        ("no one", ["no"], 0.0),
        ("Yes.", ["yes"], 1.0),
        ("no one", ["no", "one"], 2 / 3),
        ("东京，日本", ["东京"], 2 / 3),  # P = 2/4, R = 2/2; punctuation is no word
        ("東京 Tower。", ["東京tower"], 1.0),
        ("ไทย", ["เป็นไทย"], 2 / 3),  # ไ ท ย of เ ป็ น ไ ท ย: P = 3/3, R = 3/6
        ("ភ្នំ\u200bពេញ", ["ភ្នំពេញ"], 1.0),
        ("서울은 수도", ["서울 수도"], 0.5),  # Korean has spaces
        ("“Paris”", ["Paris"], 0.0),  # as in SQuAD's script
        (None, ["Paris"], 0.0),
        ("?!", ["..."], 0.0),
    ],
)
def test_token_f1(prediction, golden_answers, score):
    assert token_f1(prediction, golden_answers) == pytest.approx(score)


@pytest.mark.parametrize(
    ("prediction", "golden_answers", "score"),
    [
        ("It is Paris, in France.", ["Paris"], 1.0),
        ("Paris/Rome", ["Rome"], 1.0),
        ("the US", ["U.S."], 1.0),
        ("in the U.S. army", ["US"], 1.0),
        ("I know", ["no"], 0.0),
        ("Paris", ["Paris, France"], 0.0),
        ("东京是日本的首都", ["东京"], 1.0),
        ("東京は日本の首都です", ["東京"], 1.0),
        ("北京是中国的首都", ["东京"], 0.0),
        ("京东", ["东京"], 0.0),
        ("กรุงเทพเป็นเมืองหลวง", ["กรุงเทพ"], 1.0),
        ("ที่", ["ท"], 0.0),  # a letter goes with its marks
        ("ວຽງຈັນເປັນນະຄອນຫຼວງ", ["ນະຄອນຫຼວງ"], 1.0),
        ("ភ្នំ\u200bពេញ\u200bជា\u200bរដ្ឋធានី", ["ភ្នំពេញ"], 1.0),
        ("နေပြည်တော်သည်မြို့တော်ဖြစ်သည်", ["မြို့တော်"], 1.0),
        ("서울은 수도", ["서울"], 0.0),
        ("anything", ["?!"], 0.0),
        (None, ["Paris"], 0.0),
    ],
)
def test_sub_exact_match(prediction, golden_answers, score):
    assert sub_exact_match(prediction, golden_answers) == score


words = st.lists(st.sampled_from(["paris", "rome", "the", "of", "x"]), min_size=1, max_size=5).map(" ".join)


SPACED = "ab é’“—1ж α한 कि ع.,'"
spaced = st.text(alphabet=SPACED, min_size=1, max_size=8)
words |= spaced


@settings(deadline=None)
@given(prediction=words, golds=st.lists(words, min_size=1, max_size=4))
def test_f1_equals_squads_and_bounds_exact_match(prediction, golds):
    assume(squad_normalize(prediction) and all(map(squad_normalize, golds)))
    f1 = token_f1(prediction, golds)
    assert f1 == pytest.approx(max(squad_f1(prediction, gold) for gold in golds))
    assert exact_match(prediction, golds) <= f1 <= 1.0
    assert f1 == token_f1(prediction, golds[::-1])


@pytest.mark.parametrize(
    ("text", "golden_answers", "holds"),
    [
        ("<information>Paris</information>", ["Paris"], True),
        ("I know", ["no"], False),
        ("New and York", ["New York"], False),
        ("the new york", ["The New-York"], True),
        ("founded by the O'Brien family", ["O'Brien"], True),
        ("Rome", ["Paris", "rome"], True),
        ("anything", ["?!"], False),
        ("anything", ["。"], False),
        ("“Paris”—or 「東京」", ["Paris"], True),
        ("“Paris”—or 「東京」", ["東京"], True),
        ("founded by O’Brien", ["O'Brien"], True),
        ("un cafe\u0301 noir", ["café"], True),
        ("", ["Paris"], False),
    ],
)
def test_contains_answer(text, golden_answers, holds):
    assert contains_answer(text, golden_answers) is holds


phrases = st.text(alphabet="ab .-'’東京。ไท", min_size=1, max_size=8)


@settings(deadline=None)
@given(prediction=phrases, golds=st.lists(phrases, min_size=1, max_size=3))
def test_sub_exact_match_is_never_below_exact_match(prediction, golds):
    score = sub_exact_match(prediction, golds)
    assert exact_match(prediction, golds) <= score
    assert contains_answer(prediction, golds) <= score


@pytest.mark.parametrize("function", [exact_match, sub_exact_match, token_f1, contains_answer])
@pytest.mark.parametrize("golden_answers", [[], "Paris"])
def test_golden_answers_must_be_a_list_with_an_answer(function, golden_answers):
    with pytest.raises(ValueError, match=f"golden_answers must be .* got {re.escape(repr(golden_answers))}"):
        function("Paris", golden_answers)
