"""Agents with adapters of their own act, in an environment or behind the endpoint, and are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from sorl_trl import AgentRollout, SOGRPOConfig
from sorl_trl.experimental import MultiAgentTrainer
from sorl_trl.rollout import EngineOptions, Reply, RolloutLimits, TagProtocol
from sorl_trl.rollout.policy_rollout import policy_engine
from sorl_trl.types import Turn
from tests.agents import steps_after
from tests.api_agents import build as build_api
from tests.critics import lora_config
from tests.policies import acting_policy, acting_tokenizer
from tests.training import settings

pytestmark = pytest.mark.trains

TOKENIZER = acting_tokenizer(("guess",))
LARGE = lora_config(r=4, lora_alpha=16)
"""Enough to tell two agents apart."""


class Team:
    """The planner and the searcher guess in turn, in one context."""

    protocol = TagProtocol(tools=("guess",))

    def reset(self) -> None:
        self.agent = "planner"

    def step(self, turn: Turn) -> Reply:
        self.agent = "searcher" if self.agent == "planner" else "planner"
        return Reply("1", reward=float(turn.action.content == "3"))


class Recording(MultiAgentTrainer):
    """Keeps its last batch, with the log-probabilities of what sampled."""

    batch: Any = None

    def agent_engine(self, make: Any) -> Any:
        engine = super().agent_engine(make)
        for agent in self.agents:
            engine.of_agent(agent).logprobs_at = self.temperature
        return engine

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.batch = super()._generate_and_score_completions(inputs)
        return self.batch


class OfPlannerAndChecker(Recording):
    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, agents={"planner": LARGE, "checker": LARGE}, **named)


def guessing_policy() -> Any:
    """Rarely answers, and prefers some digits."""
    policy = acting_policy(TOKENIZER)
    with torch.no_grad():
        policy.lm_head.weight.add_(0.2 * torch.randn(policy.lm_head.weight.shape))
        for word in ("<answer>", "</answer>"):
            policy.lm_head.weight[TOKENIZER.convert_tokens_to_ids(word)] *= 0.3
    return policy


def build(folder: Path, engine: str = "slots", trainer_class: Any = Recording, team: Any = Team, **more: Any) -> Any:
    limits = RolloutLimits(max_turns=4, max_turn_tokens=6, max_observation_tokens=6, max_trajectory_tokens=48)
    options = EngineOptions(engine, rejoin_after=1)
    return trainer_class(
        guessing_policy(),
        lambda trajectory, **_: [sum(turn.reward or 0.0 for turn in each.turns) for each in trajectory],
        SOGRPOConfig(**settings(folder, **{"max_completion_length": 48, "max_steps": 3, **more})),
        Dataset.from_list([{"prompt": "<guess> 1 </guess>"}] * 8),
        processing_class=TOKENIZER,
        rollout_func=AgentRollout(team, limits=limits, engine=options),
        agents={"planner": LARGE, "searcher": LARGE},
    )


def difference(trainer: Any) -> float:
    """The largest, of the log-probabilities of what was sampled to those of the trainer."""
    batch = trainer.batch
    scores = trainer._score(trainer.model, batch).logps
    return float((scores - batch["sampling_per_token_logps"])[batch["agent_ids"] >= 0].abs().max())


@pytest.mark.parametrize("world", ["environment", "endpoint"])
def test_what_was_recorded_is_what_the_agents_policy_computes(tmp_path: Path, world: str) -> None:
    """In float32: each agent reads the whole context, its own turns and the other's, with its own adapter."""
    trainer = build(tmp_path) if world == "environment" else build_api(tmp_path, OfPlannerAndChecker)
    rows = [dict(trainer.train_dataset[i // 4]) for i in range(16)]
    trainer.model.train()
    trainer._generate_and_score_completions(rows)
    counts = [int((trainer.batch["agent_ids"] == number).sum()) for number in (0, 1)]
    assert min(counts) > 30, counts
    assert difference(trainer) < 1e-4
    first, second = (
        {n.replace(f".{agent}", ""): p for n, p in trainer.model.named_parameters() if agent in n.split(".")}
        for agent in trainer.agents
    )
    for name, parameter in first.items():  # the agents exchange their adapters
        parameter.data, second[name].data = second[name].data, parameter.data
    assert difference(trainer) > 0.1


def test_engines_sample_the_same(tmp_path: Path) -> None:
    """The likeliest tokens, with slots and without, which the agents do not agree on."""
    found = []
    for kind in ("slots", "lockstep"):
        trainer = build(tmp_path, trainer_class=MultiAgentTrainer, top_k=1)
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                parameter.mul_(4.0 if "lora_" in name else 1.0)
        with policy_engine(trainer, (), EngineOptions(kind)) as (engine, _):
            engine.open(2)
            for row, agent in enumerate(trainer.agents):
                engine.of_agent(agent).submit(row, [3, 7, 4], 6)
            ended: dict[int, Any] = {}
            while not engine.idle:
                ended.update(engine.poll())
        found.append([ended[row].token_ids for row in (0, 1)])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_a_run_of_agents_and_one_that_is_resumed(tmp_path: Path) -> None:
    saved = {"save_strategy": "steps", "save_steps": 1, "max_steps": 5}
    whole = build(tmp_path / "whole", **saved)
    before = {name: p.detach().clone() for name, p in whole.model.named_parameters()}
    whole.train()
    after = dict(whole.model.named_parameters())
    assert {name for name, p in after.items() if not torch.equal(p, before[name])} == {
        name for name in after if {"planner", "searcher"} & {*name.split(".")}
    }
    log = whole.state.log_history[0]
    assert log["agents/planner/grad_norm"] > 0 < log["agents/searcher/grad_norm"]
    resumed = build(tmp_path / "resumed", max_steps=5)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    ours, theirs = (steps_after(3, trainer.state.log_history) for trainer in (resumed, whole))
    assert ours == theirs and len(ours) == 2
    for name, weight in resumed.model.state_dict().items():
        assert torch.equal(weight, whole.model.state_dict()[name]), name


def test_a_turn_of_an_agent_without_an_adapter_is_refused(tmp_path: Path) -> None:
    class Other(Team):
        def reset(self) -> None:
            self.agent = "writer"

    with pytest.raises(ValueError, match="of the agent 'writer', but"):
        build(tmp_path, team=Other).train()
