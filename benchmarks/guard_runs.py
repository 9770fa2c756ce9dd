"""The recorded runs that fit a guard's rules and those that judge them, and their alarms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import stability, stability_trials, turn_length
from benchmarks.guard_curve import Tables
from benchmarks.guard_fit import Outcomes, Steps, any_of, first_alarms, watch
from benchmarks.guard_templates import BY_HAND, FITTED, own_shape, template, with_thresholds
from benchmarks.stability_grid import JUDGING_SEEDS
from benchmarks.stability_statistics import Run
from sorl_trl.diagnostics import DEFAULT_RULES, Rule


@dataclass(frozen=True)
class Part:
    """Runs of choosing or of judging seeds: their alarms at every threshold, and those of rules as they are."""

    tables: Tables
    own: dict[str, Steps]
    """Of each of `DEFAULT_RULES`."""
    sets: dict[str, Steps]
    """Of any rule of a set: as they are, and with the thresholds by hand."""

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Part:
        own = watch(DEFAULT_RULES, runs)
        fixed = any_of([own[name] for name in own if name not in FITTED], len(runs))
        tables = {name: first_alarms(template(name, own_shape(name)), runs) for name in FITTED}
        sets = {"in use": any_of(own.values(), len(runs)), "by hand": _together(with_thresholds(BY_HAND), runs)}
        return cls(Tables(tables, fixed, Outcomes.of(runs)), own, sets)

    @property
    def outcomes(self) -> Outcomes:
        return self.tables.outcomes


def _together(rules: Sequence[Rule], runs: Sequence[Run]) -> Steps:
    return any_of(watch(rules, runs).values(), len(runs))


def load_choosing() -> list[Run]:
    return [Run(record) for record in stability_trials.load()]


def load_judging() -> list[Run]:
    records = [*stability.load(), *turn_length.load()]
    return [Run(record) for record in records if record["seed"] in JUDGING_SEEDS]
