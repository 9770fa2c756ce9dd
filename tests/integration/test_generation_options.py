"""What the engine is told, with `SearchRollout` and in TRL's own generation; docs/options.md names these tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

from sorl_trl import SOGRPOTrainer, SOPPOTrainer
from tests.agents import agent_policy, agent_tokenizer, build_agent, questions
from tests.contract.test_trl_parity import settings

GENERATION_OPTIONS: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.01,
    "repetition_penalty": 1.3,
    "cache_implementation": "static",
    "generation_kwargs": {"typical_p": 0.9, "suppress_tokens": [2], "do_sample": False},
}
"""Option -> a value that is not its default."""


class Recorded(LlamaForCausalLM):
    """A policy that remembers how it was asked to generate."""

    asked: list[Any]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        self.asked.append(kwargs["generation_config"])
        return super().generate(*args, **kwargs)


def recorded_policy() -> Recorded:
    policy = agent_policy()
    policy.__class__ = Recorded
    policy.asked = []
    return policy


def native_agent(tmp_path: Path, policy: Any, trainer_class: Any = SOGRPOTrainer, **overrides: Any) -> Any:
    """A trainer that generates as TRL does."""
    sizes = {"max_completion_length": 8, "num_generations": 1 if trainer_class is SOPPOTrainer else 4}
    return trainer_class(
        policy,
        lambda completions, **_: [float(len(text)) for text in completions],
        trainer_class.config_class(**settings(tmp_path, **{**sizes, **overrides})),
        questions(16),
        processing_class=agent_tokenizer(),
    )


@pytest.mark.parametrize("rollout", ["SearchRollout", "native"])
@pytest.mark.parametrize("option", GENERATION_OPTIONS)
def test_generation_options(tmp_path: Path, option: str, rollout: str) -> None:
    value, policy = GENERATION_OPTIONS[option], recorded_policy()
    build = build_agent if rollout == "SearchRollout" else native_agent
    trainer = (
        build(tmp_path, model=policy, **{option: value})
        if rollout == "SearchRollout"
        else build(tmp_path, policy, **{option: value})
    )
    trainer._generate([row["prompt"] for row in questions(4)])
    assert policy.asked
    wanted = value if option == "generation_kwargs" else {option: value}
    for config in policy.asked:
        assert {name: getattr(config, name) for name in wanted} == wanted
