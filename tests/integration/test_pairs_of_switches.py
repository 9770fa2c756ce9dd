"""Every two switches together: each pair that a config takes stands in a row of a covering array, and each row runs.

A row is one trainer on one rollout. Its gradients are finite, the same however the rollout is split, and each switch
that is on logs what it did.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

import pytest
import torch

from sorl_trl.doctor.reading.checked_groups import unchecked
from tests.covering import Row, Rule, pairs_of
from tests.switch_pairs import ARRAY, IMPOSSIBLE, SPLIT_BY_TRL, VALUES, holds
from tests.switch_runs import World, config_of, options_of, trainer_class_of
from tests.switches import BY_THE_TRAINER, FACTORS, METRICS, REFUSED, SAID


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    folder = tmp_path_factory.mktemp("worlds")
    return {engine: World(folder, engine) for engine in FACTORS["engine"]}


def assert_runs(row: Row, world: World, folder: Path, splits: tuple[int, ...], updates: int) -> None:
    runs = [world.train(row, folder, split, updates) for split in splits]
    for run in runs:
        assert len(run.gradients) == updates
        assert all(gradient.isfinite().all() for gradient in run.gradients)
        assert run.gradients[0].abs().max() > 1e-3, "nothing is left to learn from: a weak test"
        for rule, metrics in METRICS:
            assert not holds(rule, row) or run.metrics.keys() >= set(metrics), f"{metrics} are missing"
        if row["loss"] not in SPLIT_BY_TRL:
            for ours, whole in zip(run.gradients, runs[0].gradients, strict=True):
                torch.testing.assert_close(ours, whole, rtol=1e-4, atol=2e-5 * max(whole.abs().max().item(), 0.1))


@pytest.mark.parametrize("row", ARRAY, ids=[f"{i}" for i in range(len(ARRAY))])
def test_a_row_runs(tmp_path: Path, worlds: dict[str, World], row: Row) -> None:
    assert_runs(row, worlds[row["engine"]], tmp_path, splits=(1, 4), updates=2)


@pytest.mark.slow
@pytest.mark.parametrize("row", ARRAY, ids=[f"{i}" for i in range(len(ARRAY))])
@pytest.mark.parametrize("updates", [1, 2])
def test_a_row_runs_however_it_is_split(tmp_path: Path, worlds: dict[str, World], row: Row, updates: int) -> None:
    """With one update per rollout there are no old log-probabilities.

    No more than two: the third is made at a learning rate that follows a KL which depends on the split, where
    trajectories were dropped.
    """
    assert_runs(row, worlds[row["engine"]], tmp_path, splits=(1, 2, 8), updates=updates)


def test_every_pair_is_tried_or_none_may_have_it() -> None:
    tried = {pair for row in ARRAY for pair in pairs_of(row)}
    settings = [(factor, value) for factor in sorted(VALUES) for value in VALUES[factor]]
    pairs = {pair for pair in product(settings, repeat=2) if pair[0][0] < pair[1][0]}
    assert tried | set(IMPOSSIBLE) == pairs
    assert not tried & set(IMPOSSIBLE)


def problems_of(row: Mapping[str, str], folder: Path) -> list[str]:
    """All that the config of a row refuses."""
    config_class, fields = trainer_class_of(row).config_class, options_of(row)
    if row.get("mismatch", "off") != "off":
        fields |= {"use_vllm": True}
    try:
        config = unchecked(config_class)(str(folder), max_completion_length=8, num_generations=4, **fields)
    except TypeError as error:  # a field of another trainer's
        return [str(error).replace("'", "`")]
    return [problem.what for problem in config.problems()]


def rows_of(rule: Rule) -> Iterator[dict[str, str]]:
    """Each combination of its values."""
    for values in product(*rule.values()):
        yield dict(zip(rule, values, strict=True))


@pytest.mark.parametrize(("rule", "options"), REFUSED, ids=lambda value: "-".join(value))
def test_what_is_refused_is_named(tmp_path: Path, rule: Rule, options: tuple[str, ...]) -> None:
    for row in rows_of(rule):
        found = problems_of(row, tmp_path)
        assert any(all(f"`{option}" in problem for option in options) for problem in found), (row, found)
        with pytest.raises((ValueError, TypeError)):
            config_of(row, tmp_path, **({"use_vllm": True} if "mismatch" in row else {}))


def test_nothing_else_is_refused(tmp_path: Path) -> None:
    """Rows of the array, two of whose settings are others: refused where a rule holds, and nowhere else."""
    rng = random.Random(0)
    seen = set()
    for row in ARRAY * 5:
        other = {**row, **{factor: rng.choice(VALUES[factor]) for factor in rng.sample(sorted(VALUES), 2)}}
        expected = any(holds(rule, other) for rule, _ in REFUSED)
        found = problems_of(other, tmp_path)
        assert bool(found) == expected, (other, found)
        seen.add(expected)
    assert seen == {True, False}


@pytest.mark.parametrize(("rule", "options"), BY_THE_TRAINER, ids=lambda value: "-".join(value))
def test_what_a_trainer_refuses_is_named(
    tmp_path: Path, worlds: dict[str, World], rule: Rule, options: tuple[str, ...]
) -> None:
    for row in rows_of(rule):
        whole = {factor: values[0] for factor, values in VALUES.items()} | row
        with pytest.raises(ValueError, match=".*".join(f"`{option}`" for option in options)):
            worlds[whole["engine"]].build(whole, config_of(whole, tmp_path))


@pytest.mark.parametrize(("rule", "option"), SAID, ids=lambda value: "-".join(value))
def test_what_has_no_effect_is_said(tmp_path: Path, rule: Rule, option: str) -> None:
    for row in rows_of(rule):
        with pytest.warns(UserWarning, match=f"`{option}.* has no effect"):
            config_of(row, tmp_path)
