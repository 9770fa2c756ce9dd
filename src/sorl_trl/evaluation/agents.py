"""A policy with everything that is needed to ask it, and how questions and tasks are put to one."""

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
    """A policy with everything that is needed to ask it."""

    collector: Collector
    generator: Generator | Engine
    rows: Callable[[Sequence[qa.Question]], list[dict[str, Any]]]
    """Makes a row per question, with its `prompt`: an environment is given what the row holds."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """What the chat template is given beside the messages."""


def prompt_rows(
    questions: Sequence[qa.Question], rollout: RolloutArguments, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """The rows of questions, or of the leaderboard's tasks, without control tokens that these spell out."""
    if are_tasks(questions):
        return task_rows(questions, tokenizer, rollout.is_terse)
    clean = Sanitizer(tokenizer).clean
    return qa.build_prompt_rows(questions, rollout.prompt_template, rollout.chat, clean)
