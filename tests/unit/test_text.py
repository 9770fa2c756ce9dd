from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sorl_trl.text import encodable, nests, one_line, without_user

ANY_TEXT = st.text(st.characters())
"""With halves of surrogate pairs."""


class TestEncodable:
    def test_half_a_pair_is_replaced(self) -> None:
        assert encodable("a\ud83db") == "a\ufffdb"
        assert encodable("a\ude00b", "?") == "a?b"

    def test_two_halves_make_a_character(self) -> None:
        assert encodable("\ud83d\ude00") == "\U0001f600"

    @given(ANY_TEXT)
    def test_what_comes_out_can_be_encoded_and_stays_as_it_is(self, text: str) -> None:
        once = encodable(text)
        assert once.encode().decode() == once
        assert encodable(once) is once, "what can be encoded is left alone"


def test_one_line() -> None:
    assert one_line(ValueError("a\n  b")) == "a b"
    assert one_line(KeyError()) == "KeyError"
    assert one_line("\n") == ""


def test_how_deep_data_nests() -> None:
    assert [nests(value, 1) for value in ("[[", [], [1], {"a": 1}, [[]], {"a": {}})] == [False] * 4 + [True] * 2
    deep: list[object] = []
    for _ in range(10**5):
        deep = [deep]
    assert nests(deep, 10**5) and not nests(deep, 10**5 + 1)


def test_the_user_of_a_url_is_left_out() -> None:
    assert without_user("ask http://me:s3cret@host:80/a@b?c=d@e, or") == "ask http://host:80/a@b?c=d@e, or"
    assert without_user("postgres://me@host") == "postgres://host"
    for text in ("http://host/a@b", "http://host?to=a@b", "http://host#a@b", "mail me@host", "a://b c@d"):
        assert without_user(text) == text
