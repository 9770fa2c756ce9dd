"""Trainers, with and without a critic, on trajectories that all have the same lengths."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig

from benchmarks.common import QUIET, build_tokenizer
from sorl_trl import SOGRPOTrainer, SOPPOTrainer
from sorl_trl.rollout import EngineOptions, generate_turns
from sorl_trl.rollout.policy_rollout import policy_engine


@dataclass(frozen=True)
class Variant:
    """One trainer: SO-PPO with `critic`, or SO-GRPO where that is None."""

    critic: str | None = None
    lora: bool = False


VARIANTS = {
    "so_grpo": Variant(),
    "so_grpo_lora": Variant(lora=True),
    "head": Variant("head"),
    "adapter": Variant("adapter", lora=True),
    "model": Variant("model"),
}


@dataclass(frozen=True)
class Sizes:
    """A policy, and the trajectories it is trained on: lengths in tokens."""

    hidden_size: int
    layers: int
    batch: int
    prompt: int = 32
    turns: int = 4
    turn: int = 32
    observation: int = 16
    vocabulary: int = 4096
    lora_rank: int = 8

    @property
    def completion(self) -> int:
        return self.turns * self.turn + (self.turns - 1) * self.observation


class FixedRollout:
    """A `rollout_func` whose trajectories all have the same lengths: only what is sampled differs."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        sizes = self.sizes
        prompt_ids, *_ = trainer._tokenize_prompts(prompts)
        completions: list[list[int]] = [[] for _ in prompts]
        logprobs: list[list[float]] = [[] for _ in prompts]
        with policy_engine(trainer, (), EngineOptions()) as (engine, _), closing(engine):
            engine.open(len(prompts))
            for turn in range(sizes.turns):
                contexts = [[*p, *c] for p, c in zip(prompt_ids, completions, strict=True)]
                for row, generation in enumerate(generate_turns(engine, contexts, [sizes.turn] * len(contexts))):
                    completions[row] += generation.token_ids
                    logprobs[row] += generation.logprobs or ()
                    if turn < sizes.turns - 1:
                        completions[row] += range(3, 3 + sizes.observation)
                        logprobs[row] += [0.0] * sizes.observation
        unit = sizes.turn + sizes.observation
        turn_ids = [t // unit if t % unit < sizes.turn else -1 for t in range(sizes.completion)]
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": completions,
            "logprobs": logprobs if trainer.use_vllm else None,
            "turn_ids": [turn_ids] * len(completions),
        }


def even_share(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A reward that costs nothing and differs between trajectories."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def build_trainer(variant: Variant, sizes: Sizes, policy: Path, **options: Any) -> Any:
    """The trainer of a variant: two updates of each rollout; `options` are further fields of its config."""
    trainer_class: Any = SOPPOTrainer if variant.critic else SOGRPOTrainer
    fields: dict[str, Any] = {
        **QUIET,
        "per_device_train_batch_size": sizes.batch,
        "num_generations": sizes.batch,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 1,
        "num_iterations": 2,
        "max_completion_length": sizes.completion,
        "generation_kwargs": {"suppress_tokens": [1]},
        **({"critic": variant.critic} if variant.critic else {}),
    }
    config = trainer_class.config_class(str(policy.parent / "out"), **{**fields, **options})
    lora = LoraConfig(r=sizes.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
    return trainer_class(
        str(policy),
        even_share,
        config,
        Dataset.from_list([{"prompt": " ".join(["7"] * sizes.prompt)}]),
        processing_class=build_tokenizer(sizes.vocabulary),
        peft_config=lora if variant.lora else None,
        rollout_func=FixedRollout(sizes),
    )
