"""The arguments of an evaluation: what to ask, how to sample, and those that all commands share."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from sorl_trl.checks import NOT_NEGATIVE, POSITIVE_COUNT, check_fields
from sorl_trl.command_line import options_in, parse_dataclasses
from sorl_trl.evaluation.policy import ModelArguments, Parts
from sorl_trl.rollout import EngineOptions, RolloutArguments
from sorl_trl.rollout.options import ACTORS
from sorl_trl.search import SearchArguments

ALSO_IN_RECIPES = (
    *("max_completion_length", "chat_template_kwargs"),
    *("dtype", "attn_implementation", "trust_remote_code"),
)
"""Arguments of other groups that affect the policy's behavior and mean the same in training."""


@dataclass
class EvaluationArguments:
    """What to ask, how to sample, and where results go. Raises ValueError if a value is not allowed."""

    output: str = field(
        metadata={"help": "Folder for results; an interrupted evaluation in it continues. Default: RUN/evaluation."}
    )
    questions: list[str] = field(
        default_factory=list,
        metadata={"help": "JSONL files; each is a dataset with the name of its file."},
    )
    limit: Annotated[int | None, POSITIVE_COUNT] = field(
        default=None,
        metadata={"help": "How many questions of each dataset to ask, starting with the first. Default: all."},
    )
    num_samples: Annotated[int, POSITIVE_COUNT] = field(default=1, metadata={"help": "Trajectories per question."})
    temperature: Annotated[float, NOT_NEGATIVE] = field(default=0.0, metadata={"help": "0 is greedy."})
    max_completion_length: Annotated[int, POSITIVE_COUNT] = field(
        default=2500, metadata={"help": "The most tokens after the prompt, in all turns and observations."}
    )
    batch_size: Annotated[int, POSITIVE_COUNT] = field(
        default=64,
        metadata={"help": "Trajectories to generate at once. It affects the last digits of log-probabilities."},
    )
    seed: int = field(default=0, metadata={"help": "Seed of sampling."})
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Arguments of the chat template besides the messages, such as '{\"enable_thinking\": false}'."
        },
    )

    def __post_init__(self) -> None:
        check_fields(self)
        self.template_kwargs = read_template_kwargs(self.chat_template_kwargs)
        if not self.questions:
            raise ValueError("`questions` is empty: give at least one file.")
        name, count = Counter(Path(path).stem for path in self.questions).most_common(1)[0]
        if count > 1:
            raise ValueError(f"`questions` has {name!r} twice: files need different names.")
        if self.temperature == 0 and self.num_samples > 1:
            raise ValueError(
                f"`temperature` is 0, which is greedy, but `num_samples` is {self.num_samples}: sampling needs a "
                "temperature above 0."
            )


def read_template_kwargs(given: dict[str, Any] | str | None) -> dict[str, Any]:
    """Read `chat_template_kwargs`, which a recipe gives as a mapping and a command line as JSON.

    Raises ValueError if they are neither.
    """
    try:
        read = json.loads(given) if isinstance(given, str) else {} if given is None else given
    except ValueError:
        read = given
    if not isinstance(read, dict):
        raise ValueError(f"`chat_template_kwargs` is {given!r}, but must be a JSON object.")
    return read


GROUPS = (ModelArguments, RolloutArguments, EngineOptions, EvaluationArguments, SearchArguments)
"""The dataclasses of a command line."""
USAGE = "sorl evaluate [RUN] [--OPTION VALUE ...]"
ABOUT = (
    "Asks a policy questions, scores it, and writes results and trajectories into RUN/evaluation. "
    "RUN is the output folder of `sorl train`, a checkpoint in it, or a PEFT adapter's folder. Its recipe sets how "
    "the policy is asked, and options override it. Without RUN, `--model_name_or_path` names the policy."
)


@dataclass
class Arguments:
    """The whole command line of one run."""

    evaluation: EvaluationArguments
    parts: Parts
    given: dict[str, Any]
    """The values that were set and must be used, by name: the command line's, and those of a recipe with an actor."""


def parse_arguments(words: Sequence[str], recipe: Mapping[str, Any]) -> Arguments:
    """Parse a command line, with a recipe's values as defaults, except those only for training.

    If the command line sets the actor, the recipe's actor is ignored, and the recipe may have values without effect.
    """
    agent_fields = [
        field.name for group in (RolloutArguments, EngineOptions, SearchArguments) for field in fields(group)
    ]
    shared = {*agent_fields, *ALSO_IN_RECIPES, "questions", "search_engine"}  # to be refused: another would answer
    acts_otherwise = not options_in(words).isdisjoint(ACTORS)
    left_out = ACTORS if acts_otherwise else ()
    recipe = {name: value for name, value in recipe.items() if name in shared and name not in left_out}
    (model, rollout, engine, asked, search), given = parse_dataclasses(GROUPS, words, recipe, USAGE, ABOUT)
    parts = Parts(model, rollout, engine, search, asked.max_completion_length, asked.template_kwargs)
    return Arguments(asked, parts, {**({} if acts_otherwise else recipe), **given})
