from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sorl_trl.search.engines.tokenize import STOP_WORDS, tokenize


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", []),
        ("?! ... — <|im_end|>", ["im", "end"]),
        ("?! ... — ・、。", []),
        ("The U.S. and C++", ["u", "s", "c"]),
        ("Curaçao CURACAO", ["curacao", "curacao"]),
        ("İstanbul Straße ÅNGSTRÖM", ["istanbul", "strasse", "angstrom"]),
        ("New_York O'Brien's", ["new", "york", "o", "brien", "s"]),
        ("東京タワー 2020年", ["東", "京", "タ", "ワ", "ー", "2020", "年"]),
        ("が ｶﾞ", ["が", "ガ"]),
        ("한국", ["한", "국"]),
        ("Москва Αθήνα", ["москва", "αθηνα"]),
        ("कि की", ["कि", "की"]),
        ("தமிழ்", ["தமிழ்"]),
        ("ภาษาที่", ["ภ", "า", "ษ", "า", "ที่", "ภา", "าษ", "ษา", "าที่"]),
        ("ปี2020 ๒๕๖๓", ["ปี", "2020", "๒๕๖๓"]),
        ("ລາວ", ["ລ", "າ", "ວ", "ລາ", "າວ"]),
        ("ទឹក Khmer", ["ទឹ", "ក", "ទឹក", "khmer"]),
        ("ទឹក\u200bក Khmer", ["ទឹ", "ក", "ក", "ទឹក", "កក", "khmer"]),
        ("မြို့", ["မြို့"]),
        ("מַיִם כָּתַב", ["מים", "כתב"]),
        ("كَتَبَ", ["كتب"]),
        ("to be or not to be", []),
    ],
)
def test_worked_examples(text, tokens):
    assert tokenize(text) == tokens


@settings(deadline=None)
@given(st.text())
def test_any_text_gives_words_only(text):
    for token in tokenize(text):
        assert token
        assert not set(token) & set(" \n\t_.,?!<>/\"'")
        assert token not in STOP_WORDS
