"""The stability benchmark's runs: real trainers on tiny worlds, and their records."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import stability, stability_run
from benchmarks.stability_grid import CHOOSING_SEEDS, JUDGING_SEEDS, REGIMES
from benchmarks.stability_methods import METHODS
from benchmarks.stability_run import Job, run, settings_of, summarize_rollouts
from benchmarks.worlds import (
    Apprenticeship,
    BenchmarkWorld,
    HuntWorld,
    QuestionWorld,
    WorkingWorld,
    questions,
    working,
)

from sorl_trl.sandbox import PolicyConfig, WarmStartConfig
from tests.agents import BY_THE_CLOCK


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, regime in REGIMES.items():
        small = {"trajectories": 16, "minibatch": 8, "rollouts": 6, "world": tiny_world(regime.world)}
        monkeypatch.setitem(stability_run.REGIMES, name, replace(regime, **small))
    for module in (questions, working):
        monkeypatch.setattr(module, "PRACTICE_WORLDS", 1)
    monkeypatch.setattr(questions, "EVALUATION_QUESTIONS", 4)


def tiny_world(world: BenchmarkWorld) -> BenchmarkWorld:
    policy = PolicyConfig(16, 1, 2)
    if isinstance(world, QuestionWorld):
        return replace(world, warm_start=WarmStartConfig(policy=policy, trajectories=64, steps=5))
    if isinstance(world, WorkingWorld):
        return replace(world, policy=policy, practice=(64, 5), verbosity=10, evaluation_questions=4)
    assert isinstance(world, HuntWorld)
    return replace(world, apprenticeship=Apprenticeship(policy, trajectories=64, steps=5))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all runs: the world and the policy of a seed are prepared once."""
    return tmp_path_factory.mktemp("stability")


@pytest.mark.parametrize(
    "method", [*(pytest.param(each, marks=pytest.mark.slow) for each in ("so_grpo", "so_ppo")), "grpo"]
)
def test_a_stale_run_leaves_a_whole_record(
    folder: Path, tiny: None, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What knows nothing is never right: only rewards that differ move it.
    monkeypatch.setattr(
        questions.qa, "exact_match_reward", lambda completion_ids, **_: [ids[0] % 5 / 5 for ids in completion_ids]
    )
    record = run(Job("stale", method, 1e-3, 7), folder)
    assert json.loads((folder / f"stale-{method}-0.001-7" / "record.json").read_text()) == record
    assert [evaluation["rollout"] for evaluation in record["evaluations"]] == [0, 2, 3, 4, 5, 6]
    assert len(record["rollouts"]) == 6
    assert record["error"] is None
    for name in ("reward", "kl_to_old", "kl_to_old max", "clip_fraction/token", "turns/ratio_min", "grad_norm max"):
        assert record["rollouts"][-1][name] is not None
    # Old log-probabilities are of an older policy: even the first update of a rollout is off-policy.
    log = [json.loads(line) for line in (folder / f"stale-{method}-0.001-7" / "log.jsonl").read_text().splitlines()]
    firsts = [entry["kl_to_old"] > 1e-7 for entry in log[:: len(log) // 6]]
    assert firsts[0] is False
    assert all(firsts[3:])  # a critic is warmed up for two rollouts


@pytest.mark.slow
def test_a_run_in_turns_of_working(folder: Path, tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    few = replace(stability_run.REGIMES["working-gentle"], rollouts=2)
    monkeypatch.setitem(stability_run.REGIMES, "working-gentle", few)
    record = run(Job("working-gentle", "so_grpo", 1e-3, 7), folder)
    assert [evaluation["rollout"] for evaluation in record["evaluations"]] == [0, 1, 2]
    assert record["world"] == few.world.name
    assert 0 < record["policy_parameters"] < 20_000
    assert record["rollouts"][0]["rollout/tokens_per_turn"] > 1


def test_settings_of_hunts_that_have_been_run_stay() -> None:
    """A record made with other settings is of another run."""
    assert settings_of(Job("hunt-gentle", "grpo", 3e-4, 101)).startswith("((8, 128, 32, 15, 0), ")
    assert settings_of(Job("hunt-reuse", "grpo", 1e-3, 101)).startswith("((32, 64, 16, 15, 0), ")
    assert settings_of(Job("hunt-stale", "grpo", 1e-3, 101)).startswith("((8, 64, 16, 32, 6), ")


def test_each_seed_has_a_policy_of_its_own() -> None:
    """The report's intervals are over policies as well."""
    assert {getattr(regime.world, "seeds_per_policy", 1) for regime in REGIMES.values()} == {1}


def test_regimes_name_methods_that_there_are() -> None:
    for regime in stability_run.REGIMES.values():
        assert set(regime.methods) <= stability_run.METHODS.keys()


@pytest.mark.slow
def test_a_run_does_not_depend_on_the_runs_before_it(
    folder: Path, tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(stability_run.REGIMES, "reuse", replace(REGIMES["reuse"], rollouts=2))
    first = run(Job("reuse", "so_grpo", 1e-3, 7), folder)
    run(Job("reuse", "grpo", 1e-3, 7), folder)
    again = run(Job("reuse", "so_grpo", 1e-3, 7), folder)
    for record in (first, again):
        del record["seconds"]
        for row in record["rollouts"]:
            for name in [name for name in row if name.startswith(BY_THE_CLOCK)]:
                del row[name]
    assert again == first


def test_rollouts_are_summarized() -> None:
    log = [
        {"grad_norm": 1.0, "turns/ratio_min": 0.5, "reward": 0.25},
        {"grad_norm": 3.0, "turns/ratio_min": 0.75},
        {"grad_norm": 5.0, "turns/ratio_min": None, "reward": float("nan")},
        {"grad_norm": float("inf"), "turns/ratio_min": None},
    ]
    assert summarize_rollouts(log, 2) == [
        {"grad_norm": 2.0, "grad_norm max": 3.0, "turns/ratio_min": 0.5, "reward": 0.25},
        {"grad_norm": 1e308, "grad_norm max": 1e308, "turns/ratio_min": None, "reward": None},
    ]


def test_no_seed_both_chooses_and_judges() -> None:
    assert not set(CHOOSING_SEEDS) & set(JUDGING_SEEDS)
    assert len(JUDGING_SEEDS) >= 8


def test_runs_in_the_archive_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stability, "ARCHIVE", tmp_path / "runs.jsonl.xz")
    monkeypatch.setattr(stability, "RUNS", tmp_path / "runs")
    done = {"regime": "reuse", "method": "grpo", "learning_rate": 3e-4, "seed": 201, "error": None, "harness": 3}
    done["settings"] = settings_of(Job("reuse", "grpo", 3e-4, 201))
    fresh, outdated, foreign = {**done, "seed": 202}, {**done, "settings": "others"}, {**done, "method": "other"}
    dropped = {**done, "learning_rate": 5e-4}
    unmarked = {name: value for name, value in fresh.items() if name != "harness"} | {"seed": 203}
    stability.save([done])
    for i, record in enumerate((fresh, outdated, foreign, dropped, unmarked)):
        (tmp_path / f"runs/{i}").mkdir(parents=True)
        (tmp_path / f"runs/{i}/record.json").write_text(json.dumps(record))
    assert stability.load() == [done, fresh]
    prepared: list[tuple] = []
    monkeypatch.setattr(stability, "in_parallel", lambda step, calls, workers, title: prepared.extend(calls))
    stability.run_all([Job("reuse", "grpo", 3e-4, 201), Job("reuse", "grpo", 3e-4, 202)], workers=1, title="")
    assert prepared == []


@pytest.mark.slow
def test_every_method_is_a_real_setting(folder: Path, tiny: None) -> None:
    """Each builds its trainer: no field that a config does not have."""
    for method in METHODS:
        world = stability_run.prepare(stability_run.REGIMES["reuse"].world, 7, folder)
        trainer = stability_run.build_trainer(Job("reuse", method, 1e-3, 7), world, folder / method)
        assert trainer.args.max_steps == 6 * 16
