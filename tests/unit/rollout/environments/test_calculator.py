from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sorl_trl.rollout.environments.calculator import CONSTANTS, FUNCTIONS, MAX_BITS, calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (" 1 + 2 * 3 ", "7"),
        ("2 * (3 + 4) ** 2", "98"),
        ("7 // 2 + 7 % 4", "6"),
        ("2 ** -3", "0.125"),
        ("2 ** 0.5", "1.41421356237"),
        ("-3 - +2", "-5"),
        ("round(2.567, 2) + round(2.5)", "4.57"),
        ("max(1, 2.5, sqrt(16)) + abs(-1)", "5"),
        ("log(e) + floor(pi)", "4"),
        ("1e3", "1000"),
        ("10 ** 1000", f"{10**1000}"),
        (f"2 ** {MAX_BITS - 1}", str(2 ** (MAX_BITS - 1))),
        ("(-1) ** 10 ** 9", "1"),
    ],
)
def test_arithmetic(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "why"),
    [
        ("9**9**9", "too large"),
        ("9**9**9**9", "too large"),
        ("2 ** 4096", "too large"),
        ("2 ** 4095 * 2", "too large"),
        ("1e308 * 10", "too large"),
        ("exp(1000)", "too large"),
        ("1e999", "too large"),
        ("round(1, -10**9)", "decimals"),
        ("round(1, -101)", "decimals"),
        ("round(1, 0.5)", "decimals"),
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("(-8) ** 0.5", "no real number"),
        ("2 ^ 10", "written with [*][*]"),
        ("x + 1", "'x' is unknown: there are pi"),
        ("__import__('os').system('true')", "only numbers"),
        ("open('secret')", "'open' is unknown"),
        ("(1).__class__", "only numbers"),
        ("'a' * 9", "only numbers"),
        ("True", "only numbers"),
        ("1j", "only numbers"),
        ("[1, 2]", "only numbers"),
        ("1 if 1 else 2", "only numbers"),
        ("1 < 2", "only numbers"),
        ("lambda: 1", "only numbers"),
        ("max(1, 2, key=abs)", "max takes no names"),
        ("max(*[1])", "only numbers"),
        ("1" * 501, "500 characters"),
        ("(" * 400, "no arithmetic expression"),
        ("(" * 240 + "1" + ")" * 240, "no arithmetic expression"),
        ("sqrt(-1)", "no arithmetic expression"),
        ("min()", "no arithmetic expression"),
        ("", "no arithmetic expression"),
        ("1 +", "no arithmetic expression"),
        ("\ud800", "no arithmetic expression"),
        ("\x00", "no arithmetic expression"),
        ("x := 3", "no arithmetic expression"),
    ],
)
def test_what_has_no_value_is_told(expression: str, why: str) -> None:
    assert calculate(expression).startswith("error: ")
    assert re.search(why, calculate(expression))


PIECES = ["1", "7", "0.5", "1e308", "0", "(", ")", "+", "-", "*", "**", "/", "//", "%", ",", " ", "x", "'", "^"]
PIECES += [*CONSTANTS, *(f"{name}(" for name in FUNCTIONS)]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join) | st.text(max_size=60))
def test_nothing_is_raised_and_nothing_is_endless(expression: str) -> None:
    value = calculate(expression)
    assert len(value) < 1300
    if not value.startswith("error: "):
        assert "." in value or "e" in value or int(value).bit_length() <= MAX_BITS
        assert "." not in value or math.isfinite(float(value))
