"""Hunts of a policy, turn by turn, and a `rollout_func` of them as a user would write one.

It returns TRL's keys and an `env_mask`, and uses neither the collector of this package nor its `turn_ids`: each run
of 1s in the mask is a turn. TRL's `environment_factory` was not chosen because it ends a trajectory at the first turn
that calls no tool, where a hunt answers, and because every turn would read its whole context again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from trl import GRPOTrainer

from benchmarks.worlds.hunt_game import Field, Hunt, HuntRules
from sorl_trl.rollout import TurnEnd, generate_turns, model_engine


@dataclass
class Record:
    """A hunt in token ids: what was written and read after the prompt, and by whom."""

    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    env_mask: list[int] = field(default_factory=list)
    """1 on tokens of the policy, 0 on answers."""

    def add(self, ids: Sequence[int], of_policy: bool) -> None:
        self.completion_ids += ids
        self.env_mask += [int(of_policy)] * len(ids)

    @property
    def ids(self) -> list[int]:
        return self.prompt_ids + self.completion_ids


Writer = Callable[[list[int], list[Hunt], list[list[int]]], list[list[int]]]
"""Given the numbers of the hunts that go on, the hunts, and what was read and written in each: their next turns."""


def play(hunts: Sequence[Hunt], tokenizer: PreTrainedTokenizerBase, write: Writer) -> list[Record]:
    """Play all hunts to their end, a turn of each at a time. The last answer of each ends in an end-of-text token."""
    end = [tokenizer.eos_token_id]
    records = [Record(ids) for ids in encode(tokenizer, [hunt.field.prompt for hunt in hunts])]
    while active := [number for number, hunt in enumerate(hunts) if not hunt.over]:
        turns = write(active, [hunts[number] for number in active], [records[number].ids for number in active])
        texts = tokenizer.batch_decode([ids[:-1] if ids[-1:] == end else ids for ids in turns])
        answers = [hunts[number].answer(text) for number, text in zip(active, texts, strict=True)]
        for number, turn, answer in zip(active, turns, encode(tokenizer, answers), strict=True):
            records[number].add(turn, of_policy=True)
            records[number].add(answer + (end if hunts[number].over else []), of_policy=False)
    return records


def play_with_model(
    hunts: Sequence[Hunt], tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, config: GenerationConfig
) -> list[Record]:
    """As `play`, with a policy that samples as `config` says."""
    engine = model_engine(model, TurnEnd(tokenizer, (), [tokenizer.eos_token_id]), config)

    def write(active: list[int], hunts: list[Hunt], contexts: list[list[int]]) -> list[list[int]]:
        limits = [hunt.rules.max_turn_tokens for hunt in hunts]
        return [list(turn.token_ids) for turn in generate_turns(engine, contexts, limits, active)]

    engine.open(len(hunts))
    try:
        with torch.no_grad():
            return play(hunts, tokenizer, write)
    finally:
        engine.close()


class HuntRollout:
    """A `rollout_func`, for `trl.GRPOTrainer` and the trainers of this package alike.

    Args:
        fields: to hunt in; the prompt says which one.
        rules: of each hunt.
    """

    def __init__(self, fields: Sequence[Field], rules: HuntRules) -> None:
        self._fields: Mapping[str, Field] = {field.prompt: field for field in fields}
        self._rules = rules

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        hunts = [Hunt(self._fields[prompt], self._rules) for prompt in prompts]
        model = trainer.accelerator.unwrap_model(trainer.model)
        records = play_with_model(hunts, trainer.processing_class, model, trainer.generation_config)
        return {
            "prompt_ids": [record.prompt_ids for record in records],
            "completion_ids": [record.completion_ids for record in records],
            "env_mask": [record.env_mask for record in records],
            "logprobs": None,
            "found": [hunt.found for hunt in hunts],
        }


def found_reward(found: Sequence[bool], **_: Any) -> list[float]:
    """1 for a treasure, 0 without."""
    return [float(each) for each in found]


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return ids
