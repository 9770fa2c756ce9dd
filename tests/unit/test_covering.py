"""The covering array of `tests/covering.py`, which the pairs of switches rest on."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.covering import covering_array, pairs_of

FACTORS = {"a": ("0", "1", "2"), "b": ("0", "1", "2", "3"), "c": ("0", "1"), "d": ("0", "1"), "e": ("0", "1")}
RULES = (
    {"a": ("1", "2"), "b": ("3",)},
    {"c": ("1",), "d": ("1",)},
    {"d": ("0",), "e": ("1",)},  # with the one before: not `c` and `e` both
    {"a": ("0",), "b": ("0", "1"), "c": ("0",)},
)


def allowed(row: dict[str, str]) -> bool:
    return not any(all(row[factor] in values for factor, values in rule.items()) for rule in RULES)


@pytest.mark.parametrize("seed", range(5))
def test_it_is_what_all_rows_together_hold(seed: int) -> None:
    """Against every row that there is, tried one by one."""
    rows, impossible = covering_array(FACTORS, RULES, seed)
    every = [dict(zip(FACTORS, values, strict=True)) for values in product(*FACTORS.values())]
    possible = {pair for row in every if allowed(row) for pair in pairs_of(row)}
    assert all(map(allowed, rows))
    assert {pair for row in rows for pair in pairs_of(row)} == possible
    settings = [(factor, value) for factor in FACTORS for value in FACTORS[factor]]
    pairs = {tuple(sorted(pair)) for pair in combinations(settings, 2) if pair[0][0] != pair[1][0]}
    assert set(impossible) == pairs - possible
    assert (("c", "1"), ("e", "1")) in impossible
    assert len(rows) < len(list(filter(allowed, every))) / 2


def test_it_is_the_same_again() -> None:
    assert covering_array(FACTORS, RULES) == covering_array(FACTORS, RULES)


def test_without_rules_nothing_is_impossible() -> None:
    rows, impossible = covering_array(FACTORS, ())
    assert impossible == []
    assert 12 <= len(rows) <= 18
