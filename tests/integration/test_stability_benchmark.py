"""The stability benchmark's runs: real trainers on tiny worlds, their records and the report of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import stability, stability_run
from benchmarks.stability_grid import CHOOSING_SEEDS, JUDGING_SEEDS, REGIMES
from benchmarks.stability_methods import METHODS
from benchmarks.stability_run import Job, run
from benchmarks.worlds import Apprenticeship, HuntWorld, questions
from benchmarks.worlds.hunt_game import HuntRules

from sorl_trl.sandbox import PolicyConfig, WarmStartConfig
from tests.agents import BY_THE_CLOCK

TINY = Apprenticeship(PolicyConfig(32, 1, 2), trajectories=200, steps=60, learning_rate=2e-2)
HUNTS = HuntWorld("Small hunts", "for tests", HuntRules(turns=5, shortest=2, longest=3), TINY)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("reuse", "stale", "hunt-gentle"):
        regime = REGIMES[name]
        warm_start = WarmStartConfig(policy=PolicyConfig(16, 1, 2), trajectories=64, steps=5)
        world = HUNTS if isinstance(regime.world, HuntWorld) else replace(regime.world, warm_start=warm_start)
        small = replace(regime, trajectories=16, minibatch=8, rollouts=6, epochs=2, world=world)
        monkeypatch.setitem(stability_run.REGIMES, name, small)
    monkeypatch.setattr(questions, "PRACTICE_WORLDS", 1)
    monkeypatch.setattr(questions, "EVALUATION_QUESTIONS", 4)
    monkeypatch.setattr("benchmarks.worlds.hunt.UNSEEN_FIELDS", 8)
    monkeypatch.setitem(stability_run.PPO_SETTINGS, "critic_warmup_steps", 2)  # else the policy would not move


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all runs: the world and the policy of a seed are prepared once."""
    return tmp_path_factory.mktemp("stability")


@pytest.mark.trains
@pytest.mark.parametrize("method", ["grpo", "so_grpo", "so_ppo"])
def test_a_stale_run_leaves_a_whole_record(
    folder: Path, tiny: None, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What knows nothing is never right: only rewards that differ move it.
    monkeypatch.setattr(
        questions.qa, "exact_match_reward", lambda completion_ids, **_: [ids[0] % 5 / 5 for ids in completion_ids]
    )
    record = run(Job("stale", method, 1e-3, 201), folder)
    assert json.loads((folder / f"stale-{method}-0.001-201" / "record.json").read_text()) == record
    assert [evaluation["rollout"] for evaluation in record["evaluations"]] == [0, 2, 3, 4, 5, 6]
    assert len(record["rollouts"]) == 6
    assert record["error"] is None
    for name in ("reward", "kl_to_old", "kl_to_old max", "clip_fraction/token", "turns/ratio_min", "grad_norm max"):
        assert record["rollouts"][-1][name] is not None
    # Old log-probabilities are of an older policy: even the first update of a rollout is off-policy.
    log = [json.loads(line) for line in (folder / f"stale-{method}-0.001-201/log.jsonl").read_text().splitlines()]
    firsts = [entry["kl_to_old"] > 1e-7 for entry in log[:: len(log) // 6]]
    assert firsts[0] is False
    assert all(firsts[3:])  # a critic is warmed up for two updates


@pytest.mark.slow
@pytest.mark.trains
def test_hunts_run_with_trls_trainer_and_ours(folder: Path, tiny: None) -> None:
    for method in ("grpo", "so_grpo"):
        record = run(Job("hunt-gentle", method, 1e-3, 201), folder)
        assert record["error"] is None
        assert all(0 <= each["sampled_em"] <= 1 for each in record["evaluations"])
        assert record["rollouts"][-1]["kl_to_old max"] > 0


@pytest.mark.slow
@pytest.mark.trains
def test_a_run_does_not_depend_on_the_runs_before_it(folder: Path, tiny: None) -> None:
    first = run(Job("reuse", "so_grpo", 1e-3, 201), folder)
    run(Job("reuse", "grpo", 1e-3, 201), folder)
    again = run(Job("reuse", "so_grpo", 1e-3, 201), folder)
    for record in (first, again):
        del record["seconds"]
        for row in record["rollouts"]:
            for name in [name for name in row if name.startswith(BY_THE_CLOCK)]:
                del row[name]
    assert again == first


@pytest.mark.trains
def test_what_has_run_is_reported_and_not_run_again(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stability, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(stability, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(
        stability, "in_parallel", lambda step, calls, *_: started.append([step(*call) for call in calls])
    )
    started: list[list[object]] = []
    words = ["--common", "--regimes", "reuse", "--methods", "grpo", "so_grpo", "--seeds", "201"]
    stability.main(words)
    assert [len(done) for done in started] == [1, 2]  # a world, two runs
    rows = json.loads((tmp_path / "results/stability.json").read_text())
    assert [(row["method"], row["seeds"]) for row in rows] == [("grpo", [201]), ("so_grpo", [201])]
    assert rows[1]["difference"]["seeds"] == [201]
    stability.main(words)
    assert [len(done) for done in started[2:]] == [0, 0]


def test_no_seed_both_chooses_and_judges() -> None:
    assert not set(CHOOSING_SEEDS) & set(JUDGING_SEEDS)


@pytest.mark.slow
def test_every_method_is_a_real_setting(folder: Path, tiny: None) -> None:
    """Each builds its trainer: no field that a config does not have, no piece that a method does not have."""
    world = stability_run.prepare(stability_run.REGIMES["reuse"].world, 201, folder)
    for method in METHODS:
        trainer = stability_run.build_trainer(Job("reuse", method, 1e-3, 201), world, folder / method)
        assert trainer.args.learning_rate == 1e-3
