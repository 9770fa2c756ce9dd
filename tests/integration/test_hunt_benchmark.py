"""Hunts of the stability benchmark through its runs: a rollout_func of TRL's, in TRL's trainer and in ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks import stability_run
from benchmarks.stability_grid import HUNT, HUNT_LARGE, REGIMES
from benchmarks.stability_run import GREEDY, POLICY, SAMPLED, Job, run
from benchmarks.worlds import Apprenticeship, HuntWorld
from benchmarks.worlds.hunt_game import HuntRules
from transformers import AutoModelForCausalLM, AutoTokenizer

from sorl_trl.sandbox import PolicyConfig

pytestmark = pytest.mark.trains

TINY = Apprenticeship(PolicyConfig(32, 1, 2), trajectories=200, steps=60, learning_rate=2e-2)
WORLD = HuntWorld("Small hunts", "for tests", HuntRules(turns=5, shortest=2, longest=3), TINY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all runs: the fields and the policy of a seed are prepared once."""
    return tmp_path_factory.mktemp("hunts")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.worlds.hunt.UNSEEN_FIELDS", 8)
    small = replace(REGIMES["hunt-gentle"], world=WORLD, trajectories=16, minibatch=8, rollouts=2)
    monkeypatch.setitem(stability_run.REGIMES, "hunt-gentle", small)
    monkeypatch.setitem(stability_run.PPO_SETTINGS, "critic_warmup_steps", 2)  # else the policy would not move


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "so_grpo", "so_ppo"])
def test_two_rollouts_with_every_trainer(folder: Path, method: str) -> None:
    record = run(Job("hunt-gentle", method, 1e-3, 7), folder)
    assert record["error"] is None
    assert [each["rollout"] for each in record["evaluations"]] == [0, 1, 2]
    assert all(0 <= each[name] <= 1 for each in record["evaluations"] for name in ("sampled_em", "greedy_em"))
    for row in record["rollouts"]:
        assert 1 < row["turns/per_trajectory"] <= 5  # each run of 1s in the mask is a turn
        assert row["completions/clipped_ratio"] == 0
    assert record["rollouts"][-1]["kl_to_old max"] > 0


def test_a_policy_is_examined_on_the_same_fields_each_time(folder: Path) -> None:
    prepared = WORLD.prepare(7, folder)
    tokenizer = AutoTokenizer.from_pretrained(prepared / POLICY)
    model = AutoModelForCausalLM.from_pretrained(prepared / POLICY).eval()
    examination = WORLD.examination(prepared, tokenizer)
    assert examination.score(model, GREEDY) == examination.score(model, GREEDY)
    torch.manual_seed(0)
    scores = {examination.score(model, SAMPLED) for _ in range(8)}
    assert len(scores) > 1
    assert all(score * 8 == pytest.approx(round(score * 8)) for score in scores)


def test_what_trains_is_not_what_judges(folder: Path) -> None:
    prepared = WORLD.prepare(7, folder)
    trained = set(WORLD.trainer_arguments(prepared)["train_dataset"]["prompt"])
    tokenizer = AutoTokenizer.from_pretrained(prepared / POLICY)
    judged = {field.prompt for field in WORLD.examination(prepared, tokenizer)._fields}
    assert (len(judged), len(trained & judged)) == (8, 0)


def test_worlds_that_differ_have_folders_of_their_own() -> None:
    names = [HUNT.name, HUNT_LARGE.name, WORLD.name, replace(HUNT, rules=HuntRules(notes=True)).name]
    assert len(set(names)) == 4
