"""Turns of several agents that share the policy: from a rollout's names to the tensors that are trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trl.trainer.utils import shuffle_sequence_dict

from sorl_trl import SOGRPOConfig, SOGRPOTrainer
from sorl_trl.experimental import GroupRefillConfig, GroupRefillTrainer
from sorl_trl.trainers.agents import names_of
from sorl_trl.trainers.batch import micro_batches
from tests.distributed.cases import agreeing_reward
from tests.policies import build_policy
from tests.training import settings
from tests.trajectories import FixedRollout, parity_reward, prompts

pytestmark = pytest.mark.trains

NAMES = ("completion_ids", "agent_ids")


class Team(FixedRollout):
    """Two agents take turns. Which two they are, and which of them begins, changes with the call and the row."""

    def __init__(self, *teams: tuple[str, str]) -> None:
        super().__init__()
        self.teams = teams

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        team = self.teams[self.calls % len(self.teams)]
        output = super().__call__(prompts, trainer)
        turns = [max(row) + 1 for row in output["turn_ids"]]
        return {**output, "agents": [[team[(i + k) % 2] for k in range(count)] for i, count in enumerate(turns)]}


def build(folder: Path, tokenizer: Any, rollout: Any, trainer_class: Any = SOGRPOTrainer, **overrides: Any) -> Any:
    reward, method = overrides.pop("reward_funcs", parity_reward), overrides.pop("method", None)
    config_class = {SOGRPOTrainer: SOGRPOConfig, GroupRefillTrainer: GroupRefillConfig}[trainer_class]
    torch.manual_seed(0)
    return trainer_class(
        build_policy(), reward, config_class(**settings(folder, **overrides)), prompts(),
        processing_class=tokenizer, rollout_func=rollout, method=method,
    )  # fmt: skip


def rows(trainer: Any, count: int = 8) -> list[dict[str, Any]]:
    trainer.model.train()
    return [dict(trainer.train_dataset[i // 4]) for i in range(count)]


def expected(turn_ids: Tensor, agents: list[list[int]]) -> list[list[int]]:
    """The agent of each token, from that of each turn."""
    return [[-1 if turn < 0 else agents[row][turn] for turn in turns] for row, turns in enumerate(turn_ids.tolist())]


def test_every_token_of_a_turn_has_its_agent(tmp_path: Path, tokenizer: Any) -> None:
    """Also if rows and tokens are dropped, which numbers turns anew, and in micro-batches of other rows."""
    trainer = build(tmp_path, tokenizer, Team(("searcher", "planner")))
    rollout = trainer._collect(rows(trainer))
    assert rollout.scored.agent_names == names_of(rollout.batch) == ("planner", "searcher")
    agents = [[(i + k + 1) % 2 for k in range(len(row.turns))] for i, row in enumerate(rollout.sampled)]
    found = [[number for number in row if number >= 0] for row in rollout.scored.agents.tolist()]
    assert found == agents and {len(row) for row in agents} == {1, 2, 3}
    before = rollout.batch["turn_ids"].clone()
    assert rollout.batch["agent_ids"].tolist() == expected(before, agents)
    rollout.drop(torch.arange(8) != 2)
    rollout.drop(before != 0)  # the first turn of each row
    kept = torch.where(rollout.batch["turn_ids"] >= 0, before, -1)
    assert rollout.batch["agent_ids"].tolist() == expected(kept, agents)
    assert rollout.batch["agent_ids"].amax() == 1
    whole = {tuple(ids): agents for ids, agents in zip(*(rollout.batch[n].tolist() for n in NAMES), strict=True)}
    assert len(whole) == 8
    for micro in micro_batches(shuffle_sequence_dict(rollout.batch), 4, 2, False, 1):
        assert names_of(micro) == ("planner", "searcher")
        for ids, found in zip(*(micro[name].tolist() for name in NAMES), strict=True):
            assert found == whole[tuple(ids)]


def test_groups_of_several_rollouts_have_the_names_of_all(tmp_path: Path, tokenizer: Any) -> None:
    rollout_func = Team(("b", "c"), ("a", "b"))
    options = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 2}
    options |= {"refill_rounds": 1, "reward_funcs": agreeing_reward, "method": "dapo"}
    trainer = build(tmp_path, tokenizer, rollout_func, GroupRefillTrainer, **options)
    rollout = trainer._collect(rows(trainer, 16))
    assert rollout_func.calls == 2
    assert rollout.scored.agent_names == names_of(rollout.batch) == ("a", "b", "c")
    numbers = [[rollout.scored.agent_names.index(name) for name in row.agents] for row in rollout.sampled]
    assert {number for row in numbers for number in row} == {0, 1, 2}
    assert [[number for number in row if number >= 0] for row in rollout.scored.agents.tolist()] == numbers
    assert rollout.batch["agent_ids"].tolist() == expected(rollout.batch["turn_ids"], numbers)


def test_without_names_there_is_nothing(tmp_path: Path, tokenizer: Any) -> None:
    trainer = build(tmp_path, tokenizer, FixedRollout())
    rollout = trainer._collect(rows(trainer))
    assert rollout.scored.agents is None and not rollout.batch.keys() & {"agent_ids", "agent_names"}


@pytest.mark.parametrize("bad", [["planner"], "p", ["p", 3], 7], ids=["few", "text", "number", "none"])
def test_what_names_no_agents_is_refused_with_its_row(tmp_path: Path, tokenizer: Any, bad: Any) -> None:
    class Bad(Team):
        def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
            output = super().__call__(prompts, trainer)
            row = [i for i, names in enumerate(output["agents"]) if len(names) == 2][-1]
            return {**output, "agents": [*output["agents"][:row], bad, *output["agents"][row + 1 :]]}

    trainer = build(tmp_path, tokenizer, Bad(("a", "b")))
    with pytest.raises(ValueError, match=r"`agents` is .* in row [1-7], .* for each of the row's 2 turns"):
        trainer._collect(rows(trainer))
