"""What the checks look at, as far as it could be had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from sorl_trl.doctor.findings import Unavailable
from sorl_trl.doctor.reading.checked_groups import ReadArguments
from sorl_trl.doctor.reading.recipe_file import RecipeFile
from sorl_trl.qa import Question
from sorl_trl.rollout import RolloutArguments
from sorl_trl.types import Passage

Value = TypeVar("Value")


@dataclass
class Subject:
    """A recipe under examination. Earlier checks fill in what later ones need; None is what could not be had."""

    recipe: RecipeFile
    words: Sequence[str]
    """The command line of `train.py`."""
    num_processes: int
    arguments: ReadArguments = field(default_factory=ReadArguments)
    tokenizer: PreTrainedTokenizerBase | None = None
    chat_template_works: bool = True
    config_noise: dict[str, float] = field(default_factory=dict)
    """Dropout that the model's configuration asks for, by its names there."""
    positions: int | None = None
    """Tokens that the model was made for, where it says so."""
    questions: list[Question] | None = None
    """The first of the training set."""
    questions_in_all: int = 0
    passages: list[list[Passage]] = field(default_factory=list)
    """What the search engine found for a few of the questions."""

    @property
    def raw(self) -> Any:
        """Every argument as an attribute, before any of them was checked."""
        return given(self.arguments.raw, "arguments that can be parsed")

    @property
    def max_completion_length(self) -> int:
        return int(given(self.raw.max_completion_length, "a `max_completion_length`"))

    @property
    def chat_template_kwargs(self) -> dict[str, Any]:
        """What the chat template is given; nothing where the trainer's config was refused."""
        config = self.arguments.config
        return dict(config.chat_template_kwargs or {}) if config is not None else {}

    @property
    def rollout(self) -> RolloutArguments:
        return given(self.arguments.rollout, "the arguments of the rollout")


def given(value: Value | None, what: str) -> Value:
    """The value, or `Unavailable` with what is missing."""
    if value is None:
        raise Unavailable(what)
    return value
