"""An agent of its own, over the OpenAI SDK, and a trainer that runs it: two agents in turn, a sub-agent, a reward."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from datasets import Dataset
from openai import AsyncOpenAI

from sorl_trl import EndpointRollout, SOGRPOTrainer, agent_reward
from sorl_trl.rollout import EngineOptions
from tests.policies import build_policy
from tests.tools import qwen_tokenizer
from tests.training import settings


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
