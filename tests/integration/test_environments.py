"""`environment_factory` takes every environment that TRL takes: the user's objects are left as they are."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOTrainer

from sorl_trl import SOGRPOTrainer
from tests.tools import HOSTILE, QUESTION, build, control_ids, lookup, qwen_tokenizer, rollout


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


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_environments_behave_as_under_trl(tmp_path: Path, environment: Any) -> None:
    seen, prompts = {}, {}
    for trainer_class in (SOGRPOTrainer, GRPOTrainer):
        reward = Seen()
        made: list[Any] = []

        def factory(made: list[Any] = made) -> Any:
            made.append(environment())
            return made[-1]

        given = {"environment_factory": factory, "trainer_class": trainer_class}
        trainer = build(tmp_path, qwen_tokenizer(), reward, **given)
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
    trainer = build(tmp_path, qwen_tokenizer(), reward, environment_factory={"a": StartsAnew, "b": Silent})
    said_before = [*QUESTION, {"role": "assistant", "content": "?"}]
    rows = [
        {"environment": name, "prompt": [*said_before, {"role": "user", "content": f"{i} <answer>"}]}
        for i, name in enumerate(["a", "b"] * 4)
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
    trainer = build(tmp_path, qwen_tokenizer(), Seen(), environment_factory=Owner)
    batch = trainer._generate_and_score_completions(rows)
    controls = control_ids(trainer._tokenizer, batch["prompt_ids"][0])
    assert controls.count(trainer._tokenizer.eos_token_id) == 2, "system and user"
