"""An agent over the OpenAI SDK is trained: by both trainers, with each engine, ahead, with LoRA, resumed exactly."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from examples.compacting_agent import solve
from openai import AsyncOpenAI
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

from sorl_trl import EndpointRollout, SOGRPOTrainer, SOPPOTrainer, agent_reward
from sorl_trl.ops import group_turn_advantages
from sorl_trl.records.trained import read_trained
from sorl_trl.rollout import EngineOptions
from tests.agents import steps_after
from tests.losses import assert_same_loss
from tests.policies import build_policy
from tests.tools import qwen_tokenizer
from tests.training import settings

pytestmark = pytest.mark.trains


@cache
def client() -> AsyncOpenAI:
    return AsyncOpenAI(base_url="http://127.0.0.1:1/v1", api_key="none")


async def agent(example: dict[str, Any], endpoint: Any) -> dict[str, float]:
    """Three calls of one conversation, and then one of a sub-agent, which begins a context of its own."""
    chat = client().with_options(base_url=endpoint.base_url, api_key=endpoint.api_key).chat.completions
    messages: list[Any] = [{"role": "user", "content": example["question"]}]
    for _ in range(3):
        reply = (await chat.create(model="planner", messages=messages, max_tokens=12)).choices[0].message
        messages += [reply.model_dump(exclude_none=True), {"role": "user", "content": "And then?"}]
    asked = [{"role": "user", "content": f"Check: {messages[-2].get('content')}"}]
    checked = (await chat.create(model="checker", messages=asked, max_tokens=6)).choices[0].message.content or ""
    said = "".join(each.get("content") or "" for each in messages if each["role"] == "assistant")
    return {"long": len(said) / 10, "even": float(len(checked) % 2 == 0)}


def rows(count: int = 16) -> Dataset:
    return Dataset.from_list([{"prompt": "unused", "question": f"Where is {i}?"} for i in range(count)])


def build(folder: Path, trainer_class: Any = SOGRPOTrainer, engine: str = "slots", **overrides: Any) -> Any:
    """A trainer of the agent, with a random policy whose tokens are bytes."""
    to_trainer = {name: overrides.pop(name) for name in ("peft_config", "eval_dataset") if name in overrides}
    tokenizer: Any = qwen_tokenizer()
    rollout = overrides.pop("rollout_func", None) or EndpointRollout(agent, engine=EngineOptions(engine, 4))
    defaults = {"max_completion_length": 300, "num_generations": 2, "steps_per_generation": 2, "max_steps": 3}
    return trainer_class(
        overrides.pop("model", None) or build_policy(vocab_size=len(tokenizer)),
        overrides.pop("reward_funcs", agent_reward),
        trainer_class.config_class(**settings(folder, **{**defaults, "log_turn_details": True, **overrides})),
        rows(),
        processing_class=tokenizer,
        rollout_func=rollout,
        **to_trainer,
    )


class Recording(SOGRPOTrainer):
    batch: Any = None
    logps: Any = None

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.batch = super()._generate_and_score_completions(inputs)
        self.logps = self._score(self.model, self.batch).logps
        return self.batch


def test_what_was_recorded_is_what_the_policy_computes(tmp_path: Path) -> None:
    """In several contexts, and in float32: sampled token by token, and then read at once."""
    trainer = build(tmp_path, Recording, async_staleness=1, max_steps=1)
    trainer.train()
    batch = trainer.batch
    difference = (trainer.logps - batch["sampling_per_token_logps"])[batch["turn_ids"] >= 0]
    assert difference.numel() > 300
    assert difference.abs().max() < 1e-4
    assert batch["context_ids"].min() < 0 < batch["context_ids"].max()


@pytest.mark.parametrize(("trainer_class", "engine"), [(SOGRPOTrainer, "slots"), (SOPPOTrainer, "lockstep")])
def test_a_resumed_run_continues_exactly(tmp_path: Path, trainer_class: Any, engine: str) -> None:
    saved = {"save_strategy": "steps", "save_steps": 1, "max_steps": 5}
    whole = build(tmp_path / "whole", trainer_class, engine, **saved)
    whole.train()
    resumed = build(tmp_path / "resumed", trainer_class, engine, max_steps=5)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    ours, theirs = (steps_after(1, trainer.state.log_history) for trainer in (resumed, whole))
    assert ours == theirs
    for name, weight in resumed.model.state_dict().items():
        assert torch.equal(weight, whole.model.state_dict()[name]), name


def test_lora_evaluation_and_records(tmp_path: Path) -> None:
    trainer = build(
        tmp_path,
        eval_dataset=rows(4),
        eval_strategy="steps",
        eval_steps=2,
        max_steps=2,
        per_device_eval_batch_size=4,
        save_trajectories_steps=1,
        peft_config=LoraConfig(r=2, target_modules="all-linear"),
    )
    before = {name: weight.clone() for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    trainer.train()
    assert any(
        not torch.equal(weight, before[name]) for name, weight in trainer.model.named_parameters() if name in before
    )
    first, *_ = trainer.state.log_history
    assert first["endpoint/extended"] + first["endpoint/spliced"] == 2, "of three calls of the planner"
    assert first["endpoint/new_context"] == 1, "the checker's"
    assert (first["agents/planner/turn_share"], first["agents/checker/turn_share"]) == (0.75, 0.25)
    assert first["reward"] == pytest.approx(first["agent/long"] + first["agent/even"], abs=1e-4)
    assert any("eval_reward" in entry for entry in trainer.state.log_history)
    trained = next(iter(read_trained(tmp_path)))
    assert trained.agents == ("planner", "planner", "planner", "checker")
    assert max(trained.context_ids) == 1


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_a_summary_is_trained_on_once_and_with_the_trajectorys_reward(tmp_path: Path, gamma: float) -> None:
    """An agent that begins anew from a summary after each turn: credit by trajectory and, with a discount, by turn."""
    made: list[Any] = []

    async def compacting(example: dict[str, Any], endpoint: Any) -> None:
        mine = client().with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
        await solve(example["question"], str, mine, longest=0)

    def reward(trajectory: Any, **_: Any) -> list[float]:
        made.extend(trajectory)
        return [0.0, 3.0, 1.0, 2.0]

    sizes = {"max_completion_length": 2000, "num_generations": 4, "gamma": gamma, "epsilon": 1.0}
    policy = build_policy(vocab_size=len(qwen_tokenizer())).double()
    trainer = build(tmp_path, model=policy, reward_funcs=reward, rollout_func=EndpointRollout(compacting, 6), **sizes)
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    batch = trainer._generate_and_score_completions([dict(rows(1)[0]) for _ in range(4)])

    turns = len(made[0].turns)
    assert [turn.agent for turn in made[0].turns] == ["summary", "policy"] * (turns // 2)
    assert max(made[0].context_ids) == turns // 2
    returns = torch.tensor([[r * gamma ** (turns - 1 - k) for k in range(turns)] for r in (0.0, 3.0, 1.0, 2.0)])
    advantages = group_turn_advantages(returns, torch.ones(4, turns), 4)
    assert gamma < 1 or (advantages == advantages[:, :1]).all()
    loss = torch.zeros((), dtype=torch.float64)
    for each, of_turns in zip(made, advantages, strict=True):
        for (start, end), advantage in zip(each.spans, of_turns, strict=True):
            read, said = each.read_before(start), torch.tensor(each.completion_ids[start:end])
            logits = trainer.model(torch.tensor([[*read, *said]])).logits[0, len(read) - 1 : -1]
            logp = logits.log_softmax(-1).gather(1, said[:, None]).mean()
            loss -= advantage * (logp - logp.detach()).exp() / turns / 4
    assert_same_loss(trainer, trainer._compute_loss(trainer.model, batch), loss)


def test_mistakes_are_named_before_the_first_call(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_turn_tokens"):
        build(tmp_path, rollout_func=EndpointRollout(agent, max_turn_tokens=500))
    without = qwen_tokenizer()
    without.chat_template = None
    model = build_policy(vocab_size=len(without))
    arguments = SOGRPOTrainer.config_class(**settings(tmp_path))
    rollout = EndpointRollout(agent)
    with pytest.raises(ValueError, match="chat template"):
        SOGRPOTrainer(model, agent_reward, arguments, rows(), processing_class=without, rollout_func=rollout)


def test_trls_own_trainer_is_refused(tmp_path: Path) -> None:
    """It would read all contexts as one text."""
    arguments = settings(tmp_path)
    trainer = GRPOTrainer(
        build_policy(vocab_size=300),
        lambda completions, **_: [0.0] * len(completions),
        GRPOConfig(**arguments),
        rows(),
        processing_class=qwen_tokenizer(),
        rollout_func=EndpointRollout(agent),
    )
    with pytest.raises(TypeError, match="SOGRPOTrainer"):
        trainer.train()
