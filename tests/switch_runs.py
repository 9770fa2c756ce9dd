"""Short runs of a row of `tests/switches.py`: its trainer is the real one, and its rollout is small."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback

from sorl_trl import SearchRollout, SOGRPOTrainer, SOPPOTrainer
from sorl_trl.types import Action, ActionKind, StopReason, Trajectory, Turn
from tests.agents import LIMITS, NO_WAIT, PROTOCOL, search_index
from tests.critics import lora_config
from tests.mismatch import SampledElsewhere, with_engine
from tests.policies import DIGITS, WORDS, acting_policy, acting_tokenizer, build_policy, word_tokenizer
from tests.switches import FACTORS
from tests.tools import lookup, numbered_rows, qwen_tokenizer, scripted
from tests.training import settings
from tests.trajectories import parity_reward

ROWS = 16
"""Trajectories of a rollout, in four groups."""
PROMPTS = 8


class Acting(SampledElsewhere):
    """Says of each trajectory what its turns did, in one of three nothing; log-probabilities where they are read.

    What it returns follows from the optimizer step, so that a run that is resumed gets what it would have got.
    """

    _step = 0

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        if self._step != trainer.state.global_step:
            self._step = trainer.state.global_step
            self.calls = 100 * self._step
        output = super().__call__(prompts, trainer)
        first = trainer.accelerator.process_index * len(prompts)
        kinds = [ActionKind.SEARCH if (first + i) % 3 else ActionKind.INVALID for i in range(len(prompts))]
        output["trajectory"] = [
            Trajectory((4,), (Turn((5,), "w1", Action(kind)),), StopReason.MAX_TURNS) for kind in kinds
        ]
        return output if trainer.use_vllm else {**output, "logprobs": None}


def _agrees(prompt: Any) -> bool:
    """Whether all trajectories of this prompt earn the same: of about half of the prompts."""
    return sum(map(ord, str(prompt))) % 2 == 0


def outcome_reward(prompts: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
    rewards = parity_reward(completion_ids)
    return [0.5 if _agrees(prompt) else reward for prompt, reward in zip(prompts, rewards, strict=True)]


def turn_reward(
    prompts: list[Any], turn_ids: list[list[int]], completion_ids: list[list[int]], **_: Any
) -> list[list[float] | None]:
    """One float per turn; none at all for every fourth trajectory or so, which has an outcome alone then."""
    return [
        None if sum(ids) % 4 == 0 else _of_turns(prompt, max(turns, default=-1) + 1, sum(ids))
        for prompt, turns, ids in zip(prompts, turn_ids, completion_ids, strict=True)
    ]


def _of_turns(prompt: Any, turns: int, number: int) -> list[float]:
    return [0.0 if _agrees(prompt) else (number + 2 * turn) % 5 / 5 for turn in range(turns)]


class Gradients(TrainerCallback):
    """Keeps the gradient of each optimizer step."""

    def __init__(self) -> None:
        self.of_steps: list[Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        gradients = [p.grad for p in kwargs["model"].parameters() if p.grad is not None]
        self.of_steps.append(torch.cat([gradient.flatten() for gradient in gradients]))


@dataclass
class Run:
    """What came of one run."""

    trainer: Any
    gradients: list[Tensor]
    """Of each optimizer step."""

    @property
    def metrics(self) -> dict[str, Any]:
        """All that was logged, the last value of each."""
        return {name: value for log in self.trainer.state.log_history for name, value in log.items()}


def options_of(row: Mapping[str, str]) -> dict[str, Any]:
    """What a row says in the config."""
    return {name: value for factor, chosen in row.items() for name, value in FACTORS[factor][chosen].items()}


def trainer_class_of(row: Mapping[str, str]) -> Any:
    return SOGRPOTrainer if row.get("trainer", "grpo") == "grpo" else SOPPOTrainer


def config_of(row: Mapping[str, str], folder: Path, **overrides: Any) -> Any:
    """The config of a row, or of a part of one: where a factor is missing, it has its first value."""
    trainer_class = trainer_class_of(row)
    rates = {"critic_learning_rate": 0.1} if trainer_class is SOPPOTrainer else {}
    fields = {"num_generations": 4, **rates, **options_of(row), **overrides}
    return trainer_class.config_class(**settings(folder, **fields))


class World:
    """What the runs of one engine have in common; it lies in a folder."""

    def __init__(self, folder: Path, engine: str) -> None:
        self.engine = engine
        self._folder = folder / engine
        self._folder.mkdir(parents=True)
        tokenizers = {"rollout_func": partial(word_tokenizer, WORDS), "tools": qwen_tokenizer}
        tokenizers["search"] = partial(acting_tokenizer, ["search", "information"])
        self.tokenizer = tokenizers[engine]()
        self.index = search_index(self._folder) if engine == "search" else None
        self.policy().save_pretrained(self._folder / "policy")

    def policy(self) -> Any:
        """One that searches at times; the critic of a row may be loaded from where it says it is."""
        policy: Any = build_policy(vocab_size=len(self.tokenizer))
        if self.engine == "search":
            policy = acting_policy(self.tokenizer)
            with torch.no_grad():  # about half of what it writes is a search or an answer then
                policy.lm_head.weight[self.tokenizer.convert_tokens_to_ids(["<information>", "</information>"])] = 0.0
        policy.config._name_or_path = str(self._folder / "policy")
        return policy

    def examples(self) -> Dataset:
        if self.engine == "tools":
            return Dataset.from_list([{**row, "answer": "Norway"} for row in numbered_rows(PROMPTS)])
        words = DIGITS if self.engine == "search" else WORDS[4:]
        pairs = list(product(words, repeat=2))[:PROMPTS]
        return Dataset.from_list([{"prompt": f"{' '.join(pair)} ?", "answer": pair[0]} for pair in pairs])

    def build(self, row: Mapping[str, str], config: Any) -> Any:
        """The trainer of a row."""
        trainer_class = trainer_class_of(row)
        rollouts = {"rollout_func": Acting, "search": lambda: SearchRollout(self.index, PROTOCOL, LIMITS, NO_WAIT)}
        torch.manual_seed(0)  # of the adapter's weights
        trainer = (trainer_class if row["mismatch"] == "off" else with_engine(trainer_class))(
            self.policy(),
            [outcome_reward] if row["rewards"] == "outcome" else [turn_reward, outcome_reward],
            config,
            self.examples(),
            processing_class=self.tokenizer,
            rollout_func=rollouts[self.engine]() if self.engine in rollouts else None,
            tools=[lookup] if self.engine == "tools" else None,
            peft_config=lora_config() if row["trainer"] == "adapter" else None,
        )
        if self.engine == "tools":
            trainer._generate_single_turn = scripted(self.tokenizer)
        return trainer

    def train(self, row: Mapping[str, str], folder: Path, micro_batches: int = 1, updates: int = 2) -> Run:
        """One rollout, and some optimizer steps on it, each of all its micro-batches. Processes share them."""
        processes = int(os.environ.get("WORLD_SIZE", "1"))
        sizes = {
            "per_device_train_batch_size": ROWS // micro_batches // processes,
            "gradient_accumulation_steps": micro_batches,
            "steps_per_generation": micro_batches,
            "num_iterations": updates,
            "max_steps": updates,
            "max_completion_length": 512 if self.engine == "tools" else 32,
            "gradient_checkpointing": False,
            # Linear in the gradient, and far enough for ratios to leave the clip range.
            **{"optim": "sgd", "learning_rate": 3.0, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"},
        }
        trainer = self.build(row, config_of(row, folder, **sizes))
        gradients = Gradients()
        trainer.add_callback(gradients)
        trainer.train()
        return Run(trainer, gradients.of_steps)
