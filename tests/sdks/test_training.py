"""Each SDK's agent is trained as it is. A random policy calls no tool, but it writes what no client expects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from sorl_trl import EndpointRollout, SOGRPOConfig, SOGRPOTrainer, agent_reward
from tests.sdks.agents import AGENTS, with_reward
from tests.sdks.policies import brief_policy, brief_tokenizer
from tests.training import settings

TWO_ROLLOUTS = {"gradient_accumulation_steps": 1, "steps_per_generation": 1, "num_iterations": 2, "max_steps": 4}


class Watched(SOGRPOTrainer):
    """Knows how far, in each rollout, the policy's log-probabilities are from the sampler's."""

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        gap = batch["old_per_token_logps"] - batch["sampling_per_token_logps"]
        self.gaps = [*getattr(self, "gaps", ()), gap[batch["turn_ids"] >= 0].abs().max().item()]
        return batch


class Reported(EndpointRollout):
    """Has the engine report the log-probabilities of its samples."""

    def collect(self, setup: Any, prompts: Any, examples: Any, engine: Any, *rest: Any) -> Any:
        engine.logprobs_at = 1.0
        return super().collect(setup, prompts, examples, engine, *rest)


@pytest.mark.parametrize("name", AGENTS)
def test_what_was_sampled_is_what_is_trained(name: str, search: Any, tmp_path: Path) -> None:
    """The trainer's log-probabilities are the sampler's, also after an update."""
    tokenizer = brief_tokenizer()
    policy = brief_policy(tokenizer)
    before = policy.lm_head.weight.detach().clone()
    rows = [{"prompt": "", "question": f"Where is {city}?", "follow_up": "Say it again."} for city in ("Oslo", "Bern")]
    agent = with_reward(AGENTS[name], search, lambda answer: float(len(answer)))
    trainer = Watched(
        policy,
        agent_reward,
        SOGRPOConfig(**settings(tmp_path, max_completion_length=16384, **TWO_ROLLOUTS)),
        Dataset.from_list(rows),
        processing_class=tokenizer,
        rollout_func=Reported(agent, max_turn_tokens=32),
    )
    trainer.train()
    assert len(trainer.gaps) == 2
    assert max(trainer.gaps) < 1e-3
    assert (policy.lm_head.weight - before).abs().max() > 1e-3
