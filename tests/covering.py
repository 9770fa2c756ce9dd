"""Few rows that try every pair of settings: a covering array of strength 2, made greedily."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

Row = dict[str, str]
"""Factor -> the value that it has."""
Rule = Mapping[str, Sequence[str]]
"""Factor -> values: what has one of these in every factor named is left out."""
Pair = tuple[tuple[str, str], tuple[str, str]]
_Domains = dict[str, tuple[str, ...]]
"""Factor -> the values that it may still have."""


def pairs_of(row: Mapping[str, str]) -> Iterator[Pair]:
    """Every two settings of a row, in the order of its factors' names."""
    return combinations(sorted(row.items()), 2)


def covering_array(
    factors: Mapping[str, Sequence[str]], rules: Sequence[Rule], seed: int = 0
) -> tuple[list[Row], list[Pair]]:
    """Rows in which each pair of values stands that a row may have, and the pairs that none may have.

    Each row begins with a pair that is still to be covered. Then each factor, in a random order, takes the value that
    covers most of these, of equals any; where a choice leaves another factor without a value, the next best is taken.
    """
    rng = random.Random(seed)
    settings = [(factor, value) for factor in sorted(factors) for value in factors[factor]]
    left: dict[Pair, None] = dict.fromkeys(pair for pair in combinations(settings, 2) if pair[0][0] != pair[1][0])
    rows: list[Row] = []
    impossible: list[Pair] = []
    while left:
        pair = next(iter(left))
        first = {factor: (value,) for factor, value in pair}
        domains = _narrowed({factor: tuple(values) for factor, values in factors.items()} | first, rules)
        order = rng.sample(sorted(factors), len(factors))
        shuffled = domains and {factor: tuple(rng.sample(values, len(values))) for factor, values in domains.items()}
        row = shuffled and _completed(shuffled, order, rules, left)
        if row is None:
            impossible.append(pair)
            del left[pair]
            continue
        rows.append(row)
        for covered in pairs_of(row):
            left.pop(covered, None)
    return rows, impossible


def _completed(
    domains: _Domains, order: Sequence[str], rules: Sequence[Rule], left: Mapping[Pair, None]
) -> Row | None:
    """The row with a value for each factor of `order`; None where no rule leaves any."""
    chosen = {factor: values[0] for factor, values in domains.items() if len(values) == 1}
    factor = next((factor for factor in order if factor not in chosen), None)
    if factor is None:
        return chosen

    def gain(value: str) -> int:
        new = (factor, value)
        return sum((min(new, old), max(new, old)) in left for old in chosen.items())

    for value in sorted(domains[factor], key=gain, reverse=True):
        narrowed = _narrowed({**domains, factor: (value,)}, rules)
        row = narrowed and _completed(narrowed, order, rules, left)
        if row is not None:
            return row
    return None


def _narrowed(domains: _Domains, rules: Sequence[Rule]) -> _Domains | None:
    """Without the values that would make a rule hold; None where a factor has no other."""
    changed = True
    while changed:
        changed = False
        for rule in rules:
            free = [factor for factor, values in rule.items() if not all(each in values for each in domains[factor])]
            if not free:
                return None
            if len(free) == 1:
                [factor] = free
                kept = tuple(each for each in domains[factor] if each not in rule[factor])
                changed |= len(kept) < len(domains[factor])
                domains[factor] = kept
    return domains
