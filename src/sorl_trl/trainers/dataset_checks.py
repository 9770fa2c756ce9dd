"""What a training set must have for a run to make sense; each raises ValueError before the first step."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from trl import GRPOConfig
from trl.data_utils import is_conversational


def check_dataset_size(dataset: Any, args: GRPOConfig, num_generations: int) -> None:
    """TRL leaves out what does not fill a rollout: with too few prompts it would stop before the first step."""
    needed = args.generation_batch_size // num_generations
    if isinstance(dataset, Dataset) and len(dataset) < needed:
        raise ValueError(
            f"`train_dataset` has {len(dataset)} prompts, but a rollout takes {needed}: `generation_batch_size` "
            f"{args.generation_batch_size} / `num_generations` {num_generations}. Give more prompts, or change these."
        )


def check_chat_template(dataset: Any, processing_class: Any) -> None:
    """Without a template, conversational prompts would fail in the first rollout."""
    example: dict[str, Any] = next(iter(dataset), {})
    if is_conversational(example) and not getattr(processing_class, "chat_template", None):
        raise ValueError(
            "The prompts of `train_dataset` are conversational, but the tokenizer has no chat template. Set "
            "`tokenizer.chat_template`, or use plain-text prompts."
        )
