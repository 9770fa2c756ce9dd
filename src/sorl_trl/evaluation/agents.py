"""How a policy is asked: questions, which it answers with a search engine, or tasks, which it does in worlds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from transformers import PreTrainedTokenizerBase

from sorl_trl import qa
from sorl_trl.rollout import (
    ChatProtocol,
    Collector,
    Engine,
    EnvironmentResponder,
    Generator,
    Responder,
    RolloutArguments,
    Sanitizer,
    TagProtocol,
)
from sorl_trl.rollout.environments.bfcl import BFCLEnvironment, task_rows
from sorl_trl.search import SearchBackend

Rows: TypeAlias = Callable[[Sequence[qa.Question]], list[dict[str, Any]]]
"""Makes a row per question, with its `prompt`: an environment is given what the row holds."""


@dataclass(frozen=True)
class Agent:
    """A policy with everything that is needed to ask it."""

    tokenizer: PreTrainedTokenizerBase
    collector: Collector
    generator: Generator | Engine
    rows: Rows
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """What the chat template is given beside the messages."""


def in_search(
    rollout: RolloutArguments,
    tokenizer: PreTrainedTokenizerBase,
    search: SearchBackend,
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[TagProtocol, SearchBackend, Rows]:
    """Questions: the protocol, what answers turns, and the prompts."""
    rows = question_rows(tokenizer, rollout.prompt_template, rollout.chat)
    return rollout.tag_protocol(tokenizer, template_kwargs), search, rows


def in_worlds(
    rollout: RolloutArguments, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None
) -> tuple[TagProtocol, Responder, Rows]:
    """The same of the leaderboard's tasks. Where the protocol is "terse", a function is described in a line."""
    responder = EnvironmentResponder(partial(BFCLEnvironment, rollout.is_terse))
    rows = partial(task_rows, tokenizer=tokenizer, compact=rollout.is_terse)
    return ChatProtocol().in_chat(tokenizer, template_kwargs), responder, rows


def question_rows(tokenizer: PreTrainedTokenizerBase, template: str, conversational: bool) -> Rows:
    """Makes the rows of questions, without control tokens that a question spells out."""
    clean = Sanitizer(tokenizer).clean
    return lambda questions: qa.build_prompt_rows(questions, template, conversational, clean)
