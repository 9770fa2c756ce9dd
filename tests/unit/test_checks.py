"""What arguments may be: numbers between bounds, names, and dataclasses that say it in their annotations."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sorl_trl.checks import (
    COUNT,
    NOT_NEGATIVE,
    POSITIVE_COUNT,
    SECONDS,
    SHARE,
    SWITCH,
    Number,
    OneOf,
    check_fields,
)

reals = st.floats(allow_nan=False, allow_infinity=False, width=32) | st.integers(-(10**30), 10**30)
NAMED = (COUNT, POSITIVE_COUNT, NOT_NEGATIVE, SHARE, SECONDS)


@given(reals, reals, reals)
def test_bounds_are_closed_or_open(a: float, b: float, value: float) -> None:
    low, high = sorted((a, b))
    closed, opened = Number(least=low, most=high), Number(above=low, below=high)
    assert closed.allows(value) == (low <= value <= high)
    assert opened.allows(value) == (low < value < high)
    assert closed.allows(low) and closed.allows(high) and not opened.allows(low) and not opened.allows(high)


@pytest.mark.parametrize("number", NAMED, ids=str)
def test_what_is_no_number_never_is_and_infinity_is_for_ever(number: Number) -> None:
    assert not any(number.allows(value) for value in (math.nan, -math.inf, True, False, "1", None, [1], 1j))
    assert number.allows(math.inf) == (number is SECONDS)


@pytest.mark.parametrize("value", ["false", "", "True", 0, 1, None, np.False_])
def test_what_is_no_switch(value: object) -> None:
    """All of them count as true or false in Python, 'false' as true."""
    assert not SWITCH.allows(value)


@dataclass
class Settings:
    share: Annotated[float, SHARE] = 0.5
    kind: Annotated[str | None, OneOf(("a", "b"))] = None
    seed: int = 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"share": 2.0, "kind": "c"}, r"`share` is 2.0, .*\[0, 1\]"),
        ({"share": None}, "`share` is None"),
        ({"kind": "c", "seed": -1}, "`kind` is 'c', .*'a', 'b', or None"),
    ],
)
def test_the_first_field_that_is_wrong(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_fields(Settings(**given))
    check_fields(Settings(kind="b"))
