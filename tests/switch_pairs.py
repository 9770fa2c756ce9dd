"""The rows that try every pair of settings of `tests/switches.py`."""

from __future__ import annotations

from collections.abc import Mapping

from tests.covering import Rule, covering_array
from tests.switches import BY_THE_TRAINER, FACTORS, NEEDS_VLLM, REFUSED, SAID

VALUES = {factor: tuple(values) for factor, values in FACTORS.items()}
_RULES: tuple[Rule, ...] = (*(rule for rule, _ in (*REFUSED, *BY_THE_TRAINER, *SAID)), NEEDS_VLLM)
ARRAY, IMPOSSIBLE = covering_array(VALUES, _RULES, seed=134)  # of many seeds, one with few rows
SPLIT_BY_TRL = ("bnpo",)
"""Loss types whose mean over the tokens of a micro-batch depends on how a rollout is split: TRL's own."""


def holds(rule: Rule, row: Mapping[str, str]) -> bool:
    return all(row.get(factor) in values for factor, values in rule.items())
