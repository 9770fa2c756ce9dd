"""A world without questions: hunts of several turns, with an answer after each and a reward at the end alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from examples.quickstart import Example, PolicyConfig, example_of, imitate, make_policy, store_policy, word_tokenizer
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from benchmarks.worlds.hunt_game import Field, Hunt, Hunter, HunterNoise, HuntRules, make_fields, vocabulary
from benchmarks.worlds.hunt_rollout import HuntRollout, encode, found_reward, play, play_with_model
from benchmarks.worlds.world import BenchmarkWorld, Examination

UNSEEN_FIELDS = 200
_ANSWER_TOKENS = 4
"""At most, an end of text included."""
_TRAIN_FILE, _UNSEEN_FILE = "train.json", "unseen.json"


@dataclass(frozen=True)
class Apprenticeship:
    """How a policy learns from a hunter, before it hunts for itself."""

    policy: PolicyConfig = field(default_factory=lambda: PolicyConfig(72, 2, 4))
    noise: HunterNoise = field(default_factory=HunterNoise)
    trajectories: int = 10000
    steps: int = 700
    batch_size: int = 16
    learning_rate: float = 3e-3
    seed: int = 0
    """Of the order in which it sees the trajectories; everything else follows the seed of the world."""


@dataclass(frozen=True)
class HuntWorld(BenchmarkWorld):
    """Fields to hunt in, others to be judged in, and a policy that watched a hunter in fields of a third kind.

    `rules` say how hard a hunt is: within how many turns, in fields of which sides, with turns of how many tokens.
    """

    title: str
    description: str
    rules: HuntRules = field(default_factory=HuntRules)
    apprenticeship: Apprenticeship = field(default_factory=Apprenticeship)

    @property
    def max_completion_length(self) -> int:  # type: ignore[override]
        return self.rules.turns * (self.rules.max_turn_tokens + _ANSWER_TOKENS)

    @property
    def most_turns(self) -> int:
        return self.rules.turns

    @property
    def name(self) -> str:
        rules, policy = self.rules, self.apprenticeship.policy
        return f"hunt-{rules.turns}-{rules.shortest}-{rules.longest}-{policy.hidden_size}x{policy.layers}"

    @property
    def settings(self) -> tuple[object, ...]:
        return self.rules, self.apprenticeship

    def build(self, seed: int, target: Path, cache: Path) -> Path:
        fields = make_fields(self.rules, seed, UNSEEN_FIELDS, self.apprenticeship.trajectories)
        _write(target / _TRAIN_FILE, fields.train)
        _write(target / _UNSEEN_FILE, fields.unseen)
        policy = cache / f"{self.name}-{self._cache_key(seed)}"
        return policy if policy.is_dir() else self._teach(fields.practice, seed, policy)

    def trainer_arguments(self, folder: Path) -> dict[str, Any]:
        fields = _read(folder / _TRAIN_FILE)
        return {
            "reward_funcs": found_reward,
            "train_dataset": Dataset.from_list([{"prompt": field.prompt} for field in fields]),
            "rollout_func": HuntRollout(fields, self.rules),
        }

    def examination(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> Examination:
        return _Hunts(_read(folder / _UNSEEN_FILE), self.rules, tokenizer)

    def _teach(self, fields: Sequence[Field], seed: int, target: Path) -> Path:
        tokenizer = word_tokenizer(vocabulary(self.rules))
        model = make_policy(tokenizer, self.apprenticeship.policy, seed, 2 * self.max_completion_length)
        how, examples = self.apprenticeship, watch(fields, self.rules, self.apprenticeship.noise, tokenizer, seed)
        imitate(model, examples, how.steps, how.batch_size, how.learning_rate, how.seed)
        return store_policy(model, tokenizer, target)

    def _cache_key(self, seed: int) -> str:
        parts = (self.settings, seed, torch.__version__, transformers.__version__)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


class _Hunts(Examination):
    def __init__(self, fields: Sequence[Field], rules: HuntRules, tokenizer: PreTrainedTokenizerBase) -> None:
        self._fields = fields
        self._rules = rules
        self._tokenizer = tokenizer

    def score(self, model: PreTrainedModel, config: GenerationConfig) -> float:
        hunts = [Hunt(field, self._rules) for field in self._fields]
        play_with_model(hunts, self._tokenizer, model, config)
        return sum(hunt.found for hunt in hunts) / len(hunts)


def watch(
    fields: Sequence[Field], rules: HuntRules, noise: HunterNoise, tokenizer: PreTrainedTokenizerFast, seed: int
) -> list[Example]:
    """A hunter's hunt in each of the fields, for a policy to imitate."""
    hunter = Hunter(noise, seed)
    end = tokenizer.eos_token_id

    def write(active: list[int], hunts: list[Hunt], contexts: list[list[int]]) -> list[list[int]]:
        return [[*ids, end] for ids in encode(tokenizer, [hunter.turn(hunt) for hunt in hunts])]

    records = play([Hunt(field, rules) for field in fields], tokenizer, write)
    return [example_of(record.prompt_ids, record.completion_ids, record.env_mask) for record in records]


def _write(path: Path, fields: Sequence[Field]) -> None:
    path.write_text(json.dumps([asdict(field) for field in fields]))


def _read(path: Path) -> list[Field]:
    return [Field(**each) for each in json.loads(path.read_text())]
