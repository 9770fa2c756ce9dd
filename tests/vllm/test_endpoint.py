"""An agent whose API calls a real vLLM answers: colocated, asleep between rollouts, served, ahead of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from openai import AsyncOpenAI

from sorl_trl import EndpointRollout, SOGRPOTrainer, SOPPOTrainer, agent_reward
from tests.agents import agent_tokenizer, logged
from tests.policies import CHAT
from tests.training import settings
from tests.vllm.policies import GAP, TRAINING, VLLM, load_policy, save_policy, weights_of

EXACT = 1e-4


async def agent(example: dict[str, Any], endpoint: Any) -> float:
    """Two calls of one conversation, of which the second ends at a stop string of its own, and one of a sub-agent."""
    chat = AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key).chat.completions
    messages: list[Any] = [{"role": "user", "content": example["prompt"]}]
    for stop in (None, ["rome"]):
        reply = (await chat.create(model="planner", messages=messages, max_tokens=5, stop=stop)).choices[0].message
        messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": "where bern"}]
    assert "rome" not in (messages[-2]["content"] or "")
    last = await chat.create(model="checker", messages=[{"role": "user", "content": "where lima"}], max_tokens=4)
    return float(len(last.choices[0].message.content or ""))


def endpoint_agent(folder: Path, trainer_class: Any = SOGRPOTrainer, **overrides: Any) -> Any:
    tokenizer: Any = agent_tokenizer()
    tokenizer.chat_template = CHAT
    rows = Dataset.from_list([{"prompt": f"where {name}"} for name in ("rome", "oslo", "bern", "lima") * 2])
    options = {"max_completion_length": 40, **TRAINING, **VLLM, "max_steps": 4, **overrides}
    return trainer_class(
        load_policy(save_policy(folder / "policy", tokenizer)),
        agent_reward,
        trainer_class.config_class(**settings(folder / "out", **options)),
        rows,
        processing_class=tokenizer,
        rollout_func=EndpointRollout(agent),
    )


def train(trainer: Any) -> None:
    before = weights_of(trainer)
    trainer.train()
    assert any((before[name] - now).abs().max() > 1e-3 for name, now in weights_of(trainer).items())
    shares = logged(trainer, "agents/checker/turn_share")
    assert len(shares) == len(logged(trainer, "reward")) and all(0 < share < 1 for share in shares)


@pytest.mark.usefixtures("engines")
@pytest.mark.parametrize(("trainer_class", "sleeps"), [(SOGRPOTrainer, False), (SOPPOTrainer, True)])
def test_colocated_and_asleep_between_rollouts(tmp_path: Path, trainer_class: Any, sleeps: bool) -> None:
    trainer = endpoint_agent(tmp_path, trainer_class, vllm_enable_sleep_mode=sleeps)
    train(trainer)
    assert max(logged(trainer, GAP)) < EXACT


@pytest.mark.parametrize("ahead", [{}, {"async_staleness": 1}], ids=["at_once", "ahead"])
def test_a_server(tmp_path: Path, server: str, ahead: dict[str, Any]) -> None:
    trainer = endpoint_agent(tmp_path, vllm_mode="server", vllm_server_base_url=server, **ahead)
    train(trainer)
    if not ahead:
        assert max(logged(trainer, GAP)) < EXACT
