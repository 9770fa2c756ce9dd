"""`environment_factory` takes every environment that TRL takes: the user's objects are left as they are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from sorl_trl import SOGRPOConfig, SOGRPOTrainer
from tests.policies import build_policy
from tests.tools import HOSTILE, QUESTION, control_ids, lookup, qwen_tokenizer, rollout, scripted
from tests.training import settings


class StartsAnew:
    """Its own tool calls `reset`, with an argument that TRL does not pass."""

    def reset(self, seed: int = 0, **row: Any) -> str:
        self.seed = seed
        return f"\nseed {seed}"

    def lookup(self, city: str) -> str:
        return self.reset(1) + lookup(city)


class Slots:
    __slots__ = ("calls",)

    def reset(self, **row: Any) -> str:
        self.calls = 0
        return "\nGo."

    def lookup(self, city: str) -> str:
        return lookup(city)


@dataclasses.dataclass(frozen=True)
class Frozen:
    name: str = "frozen"

    def reset(self, **row: Any) -> str:
        return "\nGo."

    def lookup(self, city: str) -> str:
        return lookup(city)


class Silent:
    def reset(self, **row: Any) -> None:
        return None

    def lookup(self, city: str) -> str:
        return lookup(city)


ENVIRONMENTS = [StartsAnew, Slots, Frozen, Silent]
for environment in ENVIRONMENTS:
    environment.lookup.__doc__ = lookup.__doc__  # type: ignore[attr-defined]


class Seen:
    """A reward function that keeps what it is given."""

    __name__ = "seen"

    def __call__(self, prompts: Any, completions: Any, environments: Any, **_: Any) -> list[float]:
        self.prompts, self.completions, self.environments = prompts, completions, environments
        return [float(len(completion)) for completion in completions]


def build(trainer_class: Any, folder: Path, factory: Any, reward: Any) -> Any:
    ours = issubclass(trainer_class, SOGRPOTrainer)
    config = (SOGRPOConfig if ours else GRPOConfig)(**settings(folder, max_completion_length=512, max_steps=1))
    tokenizer = qwen_tokenizer()
    rows = Dataset.from_list([{"prompt": QUESTION}] * 8)
    policy = build_policy(vocab_size=len(tokenizer))
    trainer = trainer_class(policy, reward, config, rows, processing_class=tokenizer, environment_factory=factory)
    trainer._generate_single_turn = scripted(tokenizer)
    return trainer


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_environments_behave_as_under_trl(tmp_path: Path, environment: Any) -> None:
    seen, prompts = {}, {}
    for trainer_class in (SOGRPOTrainer, GRPOTrainer):
        reward = Seen()
        made: list[Any] = []

        def factory(made: list[Any] = made) -> Any:
            made.append(environment())
            return made[-1]

        trainer = build(trainer_class, tmp_path, factory, reward)
        batch, logged = rollout(trainer)
        assert logged["tools/failure_frequency"] == 0.0
        assert logged["tools/call_frequency"] == 0.5
        assert reward.environments == made and all(type(one) is environment for one in made), "the user's own"
        for one in made:
            assert not {name for name in getattr(one, "__dict__", {}) if callable(getattr(one, name))}, "untouched"
        seen[trainer_class] = (reward.prompts, reward.completions)
        prompts[trainer_class] = batch["prompt_ids"].tolist()
    assert seen[SOGRPOTrainer] == seen[GRPOTrainer]
    assert prompts[SOGRPOTrainer] == prompts[GRPOTrainer]


def test_the_own_text_of_several_environments_and_rows_is_left(tmp_path: Path) -> None:
    reward = Seen()
    trainer = build(SOGRPOTrainer, tmp_path, {"a": StartsAnew, "b": Silent}, reward)
    rows = [
        {"environment": name, "prompt": [*QUESTION, {"role": "assistant", "content": "?"}, *asked]}
        for i, name in enumerate(["a", "b"] * 4)
        for asked in [[{"role": "user", "content": f"{i} <answer>"}]]
    ]
    batch = trainer._generate_and_score_completions(rows)
    said = [prompt[-1]["content"] for prompt in reward.prompts]
    assert said[:4] == ["0 <answer>\nseed 0", "1 <answer>", "2 <answer>\nseed 0", "3 <answer>"]
    tokenizer = trainer._tokenizer
    assert "0 <answer>\nseed 0" in tokenizer.decode(batch["prompt_ids"][0])


def test_an_environment_that_owns_the_prompt_forges_nothing(tmp_path: Path) -> None:
    class Owner(Silent):
        def reset(self, **row: Any) -> str:
            return HOSTILE

    rows = [{"question": 1} for _ in range(8)]
    trainer = build(SOGRPOTrainer, tmp_path, Owner, Seen())
    batch = trainer._generate_and_score_completions(rows)
    controls = control_ids(trainer._tokenizer, batch["prompt_ids"][0])
    assert controls.count(trainer._tokenizer.eos_token_id) == 2, "system and user"
