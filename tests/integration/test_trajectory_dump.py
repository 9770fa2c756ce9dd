"""`save_trajectories_steps`: what an update trains on, as the loss sees it."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from sorl_trl import SOGRPOTrainer
from sorl_trl.records.trained import TrainedTrajectory, read_trained
from tests.agents import build_agent, search_index

CYCLE = {"num_iterations": 2, "steps_per_generation": 2, "gradient_accumulation_steps": 2}
"""A rollout of 16 trajectories, one group, makes two updates, each of two micro-batches."""


def build(folder: Path, trainer_class: Any = SOGRPOTrainer, **overrides: Any) -> Any:
    folder.mkdir(exist_ok=True)
    fields = {"per_device_train_batch_size": 8, "num_generations": 16, "max_steps": 4, "learning_rate": 3e-2, **CYCLE}
    return build_agent(folder, trainer_class=trainer_class, **{**fields, "save_trajectories_steps": 2, **overrides})


def dumped(trainer: Any) -> list[TrainedTrajectory]:
    trainer.train()
    return list(read_trained(trainer.args.output_dir))


def turns_of(trained: TrainedTrajectory, values: tuple[Any, ...]) -> dict[int, list[Any]]:
    turns = defaultdict(list)
    for turn, value in zip(trained.turn_ids, values, strict=True):
        if turn >= 0:
            turns[turn].append(value)
    return turns


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[TrainedTrajectory]:
    """Of the second and fourth step: second updates on their batches, so that ratios have moved."""
    fields = {"epsilon": 0.02, "epsilon_high": 0.04, "scale_clip_range": False, "target_kl": 0.0}
    return dumped(build(tmp_path_factory.mktemp("run"), **fields, seed=3))


def test_every_trajectory_of_a_step_is_kept_once(rows: list[TrainedTrajectory]) -> None:
    assert [trained.step for trained in rows] == [2] * 16 + [4] * 16
    assert [trained.generated_at_step for trained in rows] == [0] * 16 + [2] * 16


def test_turns_share_the_geometric_mean_of_their_ratios(rows: list[TrainedTrajectory]) -> None:
    for trained in rows:
        token_ratios = turns_of(trained, trained.token_ratios)
        for turn, ratios in turns_of(trained, trained.ratios).items():
            expected = math.exp(fmean(map(math.log, token_ratios[turn])))
            assert ratios == pytest.approx([expected] * len(ratios), rel=1e-4)
    assert max(max(trained.ratios) for trained in rows) > 1.02


def test_a_group_is_whole_however_its_rollout_is_split(tmp_path: Path) -> None:
    split = {"num_generations": 4, "num_iterations": 1, "steps_per_generation": 4, "gradient_accumulation_steps": 1}
    trainer = build(tmp_path / "run", per_device_train_batch_size=2, save_trajectories_steps=1, **split)
    groups = defaultdict(list)
    for trained in dumped(trainer):
        groups[trained.generated_at_step, trained.group].append(trained)
    assert sorted(groups) == [(0, 0), (0, 1)]
    for members in groups.values():
        assert len({trained.prompt for trained in members}) == 1
        assert {trained.group_rewards for trained in members} == {members[0].group_rewards}
        assert Counter(trained.reward for trained in members) == Counter(members[0].group_rewards)
    assert any(len({trained.step for trained in members}) > 1 for members in groups.values())


def test_advantages_are_those_of_the_group(rows: list[TrainedTrajectory]) -> None:
    for step in (2, 4):
        group = [trained for trained in rows if trained.step == step]
        rewards = [trained.reward for trained in group if trained.reward is not None]
        assert len(set(rewards)) > 1
        for trained, reward in zip(group, rewards, strict=True):
            expected = (reward - fmean(rewards)) / (stdev(rewards) + 1e-4)
            assert trained.advantages == pytest.approx([expected] * len(trained.tokens), abs=1e-4)


def test_clip_states_say_where_the_gradient_is_gone(rows: list[TrainedTrajectory]) -> None:
    seen = set()
    for trained in rows:
        columns = (trained.turn_ids, trained.ratios, trained.advantages, trained.clipped)
        for turn, ratio, advantage, state in zip(*columns, strict=True):
            seen.add(state)
            if turn < 0:
                assert state == "none"
            elif 0.98 <= ratio <= 1.04:
                assert state == "inside"
            else:
                gone = advantage < 0 if ratio < 0.98 else advantage > 0
                assert state == ("clipped" if gone else "outside")
    assert seen == {"none", "inside", "outside", "clipped"}


def test_what_was_asked_and_answered_goes_with_it(rows: list[TrainedTrajectory]) -> None:
    for trained in rows:
        assert trained.golden_answers == (trained.prompt.split()[-1],)
        assert trained.reward == len(turns_of(trained, trained.tokens))
        assert len(trained.actions) == len(trained.turn_rewards) == trained.reward
        assert (trained.stop_reason == "answered") == (trained.actions[-1] == "answer")
        if trained.stop_reason == "answered":
            assert f"<answer> {trained.answer} </answer>" in "".join(trained.tokens)
    assert any(trained.answer for trained in rows)


def test_a_run_resumed_within_a_cycle_still_knows_what_it_asked(tmp_path: Path) -> None:
    """And what the run before wrote of later steps is gone."""
    run: dict[str, Any] = {"search": search_index(tmp_path), "save_trajectories_steps": 4}
    run |= {"lr_scheduler_type": "constant"}
    whole = dumped(build(tmp_path / "run", save_strategy="steps", save_steps=3, **{**run, "max_steps": 8}))
    resumed = build(tmp_path / "run", **run)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert {trained.step for trained in whole} == {4, 8}
    assert list(read_trained(tmp_path / "run")) == [trained for trained in whole if trained.step == 4]
