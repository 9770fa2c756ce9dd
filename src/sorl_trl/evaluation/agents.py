"""A policy with everything that an evaluation needs, and the prompts of questions and tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from sorl_trl import qa
from sorl_trl.rollout import Collector, Engine, Generator, RolloutArguments, Sanitizer
from sorl_trl.rollout.environments.bfcl import are_tasks, task_rows


@dataclass(frozen=True)
class Agent:
    """A policy with everything that an evaluation needs to ask it."""

    collector: Collector
    generator: Generator | Engine
    rows: Callable[[Sequence[qa.Question]], list[dict[str, Any]]]
    """Makes a row per question, with its `prompt`. The environment gets the whole row."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template beside the messages."""


def prompt_rows(
    questions: Sequence[qa.Question], rollout: RolloutArguments, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """The rows of questions or of the leaderboard's tasks, with control tokens in their text neutralized."""
    if are_tasks(questions):
        return task_rows(questions, tokenizer, rollout.is_terse)
    clean = Sanitizer(tokenizer).clean
    return qa.build_prompt_rows(questions, rollout.prompt_template, rollout.chat, clean)
