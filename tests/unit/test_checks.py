"""What arguments may be: numbers between bounds, names, and dataclasses that say it in their annotations."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Annotated, Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import HfArgumentParser

from sorl_trl.checks import (
    COUNT,
    NOT_NEGATIVE,
    POSITIVE_COUNT,
    SECONDS,
    SHARE,
    SWITCH,
    Number,
    OneOf,
    check_choice,
    check_fields,
)

reals = st.floats(allow_nan=False, allow_infinity=False, width=32) | st.integers(-(10**30), 10**30)
NAMED = (COUNT, POSITIVE_COUNT, NOT_NEGATIVE, SHARE, SECONDS)


@given(reals, reals, reals)
def test_closed_bounds_are_allowed(a: float, b: float, value: float) -> None:
    least, most = sorted((a, b))
    number = Number(least=least, most=most)
    assert number.allows(least) and number.allows(most)
    assert number.allows(value) == (min(value, least) == least and max(value, most) == most)


@given(reals, reals, reals)
def test_open_bounds_are_not(a: float, b: float, value: float) -> None:
    above, below = sorted((a, b))
    number = Number(above=above, below=below)
    assert not number.allows(above) and not number.allows(below)
    assume(value not in (above, below))
    assert number.allows(value) == Number(least=above, most=below).allows(value)


@given(st.integers(0, 10**9), st.floats(0.01, 0.99))
def test_between_whole_numbers_there_is_none(value: int, part: float) -> None:
    assert COUNT.allows(value) and COUNT.allows(float(value))
    assert not COUNT.allows(value + part)


@pytest.mark.parametrize("number", NAMED, ids=str)
def test_what_is_no_number_never_is_and_infinity_is_for_ever(number: Number) -> None:
    assert not any(number.allows(value) for value in (math.nan, -math.inf, True, False, "1", None, [1], 1j))
    assert number.allows(math.inf) == (number is SECONDS)


@pytest.mark.parametrize("value", [np.int64(1), np.float32(1.0), 10**400])
def test_numbers_of_other_kinds_are_numbers(value: Any) -> None:
    assert COUNT.allows(value) and POSITIVE_COUNT.allows(value)


@given(st.text(), st.lists(st.text(), min_size=1))
def test_a_choice(value: str, choices: list[str]) -> None:
    assert OneOf(tuple(choices)).allows(value) == (value in choices)
    check_choice("name", choices[0], choices)


@pytest.mark.parametrize("value", ["false", "", "True", 0, 1, None, np.False_])
def test_what_is_no_switch(value: object) -> None:
    """All of them count as true or false in Python, 'false' as true."""
    assert not SWITCH.allows(value)


@dataclass
class Base:
    steps: int = 1
    limit: int | None = None


@dataclass
class Settings(Base):
    share: Annotated[float, SHARE] = 0.5
    kind: Annotated[str | None, OneOf(("a", "b"))] = None
    seed: int = 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"share": 2.0, "kind": "c"}, "`share` is 2.0, but must be in [0, 1]."),
        ({"share": None}, "`share` is None, but must be in [0, 1]."),
        ({"kind": "c", "seed": -1}, "`kind` is 'c', but must be one of 'a', 'b', or None (null in YAML)."),
    ],
)
def test_the_first_field_that_is_wrong(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        check_fields(Settings(**given))
    assert str(error.value) == message


def test_a_parser_of_dataclasses_sees_plain_types() -> None:
    """What is said in `field(metadata=...)` would be handed to argparse, which knows no ranges."""
    parsed = HfArgumentParser(Settings).parse_args_into_dataclasses(["--share", "0.25", "--kind", "b"])[0]
    assert (parsed.share, parsed.kind, parsed.limit) == (0.25, "b", None)
    assert {each.name for each in fields(Settings)} == {"steps", "limit", "share", "kind", "seed"}
