"""What arguments may be: numbers between bounds, names, and dataclasses that declare it in their annotations."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pytest

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
    import_named,
    is_dotted,
)

NAMED = (COUNT, POSITIVE_COUNT, NOT_NEGATIVE, SHARE, SECONDS)


def test_bounds_belong_to_a_range_or_do_not() -> None:
    closed, opened = Number(least=0, most=1), Number(above=0, below=1)
    assert [closed.allows(value) for value in (-0.1, 0, 0.5, 1, 1.1)] == [False, True, True, True, False]
    assert [opened.allows(value) for value in (-0.1, 0, 0.5, 1, 1.1)] == [False, False, True, False, False]


@pytest.mark.parametrize("number", NAMED, ids=str)
def test_what_is_no_number_never_is_and_infinity_is_for_ever(number: Number) -> None:
    assert not any(number.allows(value) for value in (math.nan, -math.inf, True, False, "1", None, [1], 1j))
    assert number.allows(math.inf) == (number is SECONDS)


def test_the_last_dot_of_a_path_may_be_a_colon() -> None:
    assert import_named("agent", "os.path:join") is import_named("agent", "os.path.join") is os.path.join
    assert not any(map(is_dotted, ("os:path.join", "os::path", ":join", "os.path:", "join", None)))
    with pytest.raises(ValueError, match=r"write my_module:agent, without \.py"):
        import_named("agent", "my_module.py:agent")


@pytest.mark.parametrize("value", ["false", "", "True", 0, 1, None, np.False_])
def test_what_is_no_switch(value: object) -> None:
    """All of them count as true or false in Python, 'false' as true."""
    assert not SWITCH.allows(value)


@dataclass
class Settings:
    share: Annotated[float, SHARE] = 0.5
    kind: Annotated[str | None, OneOf(("a", "b"))] = None
    seed: int = 0
    rate: float | None = None
    plain: bool = True
    text: str | float = 0.5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"share": 2.0, "kind": "c"}, r"`share` is 2.0, .*\[0, 1\]"),
        ({"share": None}, "`share` is None"),
        ({"kind": "c", "seed": -1}, "`kind` is 'c', .*'a', 'b', or None"),
        ({"share": "0.5"}, r"`share` is '0.5', which is a string, .*\[0, 1\]"),
        ({"seed": "1"}, "`seed` is '1', which is a string, but must be a number"),
        ({"rate": "1e-6"}, "`rate` is '1e-6', which is a string, but must be a number"),
        ({"plain": "false"}, "`plain` is 'false', which is a string, .*True, False"),
    ],
)
def test_the_first_field_that_is_wrong(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_fields(Settings(**given))
    check_fields(Settings(kind="b", text="0.5"))
