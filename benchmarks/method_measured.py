"""What the pages of methods are made of: runs, and their paired differences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.seed_statistics import paired
from benchmarks.stability_report import em
from benchmarks.stability_statistics import Grid, Run

BASELINE, OURS = "grpo", "so_grpo"
STAND_INS = {BASELINE: "plain"}
"""A row to the one that is compared with where the first has no run of a harness: GRPO in our trainer for TRL's."""
Tables = Mapping[str, Mapping[str, Sequence[Run]]]
"""Regime to method to its judging runs at one kind of learning rate."""


@dataclass(frozen=True)
class Measured:
    """What the pages are made of.

    Args:
        grid: the plan.
        tables: the runs that count, at the common learning rate.
        replaced: runs of earlier harnesses that have been made again, for rows that were not: a difference is within
            one harness.
        costs: regime to method to the CPU time of a rollout over that of GRPO's (`method_cost.py`), where measured.
        own: runs at each row's own learning rate, where one was looked for.
    """

    grid: Grid
    tables: Tables
    replaced: Tables
    costs: Mapping[str, Mapping[str, float]]
    own: Tables = field(default_factory=dict)

    def difference(self, name: str, baseline: str, regime: str) -> dict[str, Any] | None:
        """`paired` of a row and another in a regime, or the other's stand-in, which `by` names.

        `None` without a pair, and of a row with itself.
        """
        for other in filter(None, (baseline, STAND_INS.get(baseline))):
            pair = paired(self.tables[regime].get(name, []), self.all_of(other, regime))
            if name in (baseline, other):
                return None
            if pair is not None:
                return {**pair, "by": other}
        return None

    def all_of(self, name: str, regime: str) -> list[Run]:
        """A row's runs of every harness."""
        return [*self.tables[regime].get(name, []), *self.replaced.get(regime, {}).get(name, [])]

    def less_ours(self, name: str, regime: str) -> dict[str, Any] | None:
        """`paired` of a row at its own learning rate and our defaults at the common one."""
        return None if name == OURS else paired(self.own[regime][name], self.all_of(OURS, regime))


def difference_cell(found: Mapping[str, Any] | None) -> str:
    """Mean difference, interval, p and pairs."""
    if found is None:
        return "–"
    mark = "°" if found.get("by") in STAND_INS.values() else ""
    return f"{em(found['mean'], found['interval'], '+.3f')}, p {found['p']:.2g} ({len(found['seeds'])}){mark}"
