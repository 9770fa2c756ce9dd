"""A small agent: a random policy whose vocabulary is mostly actions, and a corpus to search."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from examples.quickstart import PROTOCOL
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig

from sorl_trl import SearchRollout, SOGRPOTrainer, SOPPOTrainer
from sorl_trl.rollout import RetryPolicy, RolloutLimits
from sorl_trl.search import BM25Index
from sorl_trl.trainers.base import TurnLevelTrainer
from tests.policies import build_policy, word_tokenizer
from tests.training import settings

TAGS = ["<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>"]
NAMES = ["rome", "oslo", "bern", "lima", "nothing", "failed", "invalid", "where"]
VOCABULARY = ["<pad>", "<eos>", "<unk>", *TAGS, *NAMES]

BY_THE_CLOCK = ("step_time", "profiling/", "rollout/seconds_", "rollout/tokens_per_second")
"""How the names begin of metrics that are never the same twice."""

NO_WAIT = RetryPolicy(attempts=2, initial_wait_s=0.0, max_wait_s=0.0)
LIMITS = RolloutLimits(max_turns=2, max_turn_tokens=6, max_observation_tokens=6, max_trajectory_tokens=32, top_k=1)


def agent_tokenizer() -> PreTrainedTokenizerFast:
    return word_tokenizer(VOCABULARY)


def agent_policy() -> LlamaForCausalLM:
    """Samples about uniformly: some of what it writes is a search or an answer, most is invalid."""
    return build_policy(vocab_size=len(VOCABULARY))


def teach(policy: Any, tokenizer: PreTrainedTokenizerFast, scripts: Sequence[str]) -> None:
    """Have a policy follow the scripts."""
    rows = tokenizer(list(scripts), padding=True, return_tensors="pt")
    labels = rows["input_ids"].masked_fill(rows["attention_mask"] == 0, -100)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(120):
        loss = policy(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"], labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def search_index(folder: Path) -> BM25Index:
    corpus = folder / "corpus.jsonl"
    rows = [{"id": name, "title": name, "text": f"where {name}"} for name in NAMES[:4]]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return BM25Index.build(corpus, folder / "index", show_progress=False)


def questions(count: int = 8) -> Dataset:
    rows: list[dict[str, Any]] = [
        {"prompt": f"where {NAMES[i % 4]}", "golden_answers": [NAMES[i % 4]]} for i in range(count)
    ]
    return Dataset.from_list(rows)


def turns_reward(trajectory: Any, **_: Any) -> list[float]:
    """A random policy is never right, but it takes more turns at times."""
    return [float(len(t.turns)) for t in trajectory]


def build_agent(tmp_path: Path, search: Any = None, trainer_class: Any = SOGRPOTrainer, **overrides: Any) -> Any:
    """A trainer whose random policy searches a corpus of four passages."""
    to_trainer = {
        name: overrides.pop(name)
        for name in ("peft_config", "eval_dataset", "method", "callbacks")
        if name in overrides
    }
    reward_funcs = overrides.pop("reward_funcs", [turns_reward])
    limits = overrides.pop("limits", LIMITS)
    model = overrides.pop("model", None) or agent_policy()
    rows, rollout = overrides.pop("train_dataset", None) or questions(), overrides.pop("rollout_func", None)
    defaults = {"max_completion_length": 32, "max_steps": 4, "learning_rate": 1e-3}
    arguments = settings(tmp_path, **{**defaults, **overrides})
    config_class = trainer_class.config_class if issubclass(trainer_class, TurnLevelTrainer) else GRPOConfig
    if config_class is not GRPOConfig:
        arguments = {"log_turn_details": True, **arguments}
    return trainer_class(
        model,
        reward_funcs,
        config_class(**arguments),
        rows,
        processing_class=agent_tokenizer(),
        rollout_func=rollout or SearchRollout(search or search_index(tmp_path), PROTOCOL, limits, NO_WAIT),
        **to_trainer,
    )


def logged(trainer: Any, name: str) -> list[float]:
    """A metric, wherever it was logged."""
    return [log[name] for log in trainer.state.log_history if name in log]


def steps_after(step: int, log_history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was logged of each optimizer step after `step`, less what depends on the clock."""
    steps = [log for log in log_history if log["step"] > step and "loss" in log]
    return [{name: value for name, value in log.items() if not name.startswith(BY_THE_CLOCK)} for log in steps]


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


class Slow:
    """A search engine that takes its time, at every call or at one of `every` calls."""

    thread_safe = True

    def __init__(self, search: Any, seconds: float, every: int = 1) -> None:
        self.search, self.seconds, self.every, self.calls = search, seconds, every, count()

    def search_batch(self, queries: Sequence[str], k: int) -> Any:
        if next(self.calls) % self.every == 0:
            time.sleep(self.seconds)
        return self.search.search_batch(queries, k)
