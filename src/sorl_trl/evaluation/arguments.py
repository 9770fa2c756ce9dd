"""The arguments of an evaluation: the datasets, the sampling, and where results go."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from sorl_trl.checks import NOT_NEGATIVE, POSITIVE_COUNT, Number, check_choice, check_fields
from sorl_trl.qa import BENCHMARKS


@dataclass
class EvaluationArguments:
    """The arguments of an evaluation. Raises ValueError if a value is not allowed."""

    output: str = field(
        metadata={"help": "Folder for results; an interrupted evaluation in it continues. Default: RUN/evaluation."}
    )
    benchmarks: list[str] = field(
        default_factory=list,
        metadata={"help": f"Public question sets by name: {', '.join(BENCHMARKS)}."},
    )
    data_source_folder: str | None = field(
        default=None,
        metadata={"help": "Folder that has a folder named after each benchmark. Default: the Hub."},
    )
    questions: list[str] = field(
        default_factory=list,
        metadata={"help": "Your own JSONL files; each is a dataset named after its file."},
    )
    limit: Annotated[int | None, POSITIVE_COUNT] = field(
        default=None, metadata={"help": "How many questions of each dataset to ask, from the first on. Default: all."}
    )
    num_samples: Annotated[int, POSITIVE_COUNT] = field(default=1, metadata={"help": "Trajectories per question."})
    temperature: Annotated[float, NOT_NEGATIVE] = field(default=0.0, metadata={"help": "0 is greedy."})
    top_p: Annotated[float, Number(above=0, most=1)] = field(
        default=1.0, metadata={"help": "Sample from the likeliest tokens that reach this total probability."}
    )
    max_completion_length: Annotated[int, POSITIVE_COUNT] = field(
        default=2500, metadata={"help": "Tokens after the prompt, in all turns and observations."}
    )
    batch_size: Annotated[int, POSITIVE_COUNT] = field(
        default=64,
        metadata={"help": "Trajectories that advance together. It affects the last digits of log-probabilities."},
    )
    seed: int = field(default=0, metadata={"help": "Seed of sampling."})
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Arguments of the chat template beside the messages, such as '{\"enable_thinking\": false}'."
        },
    )

    def __post_init__(self) -> None:
        check_fields(self)
        self.template_kwargs = _mapping(self.chat_template_kwargs)
        for name in self.benchmarks:
            check_choice("benchmarks", name, BENCHMARKS)
        names = [*self.benchmarks, *(Path(path).stem for path in self.questions)]
        if not names:
            raise ValueError("`benchmarks` and `questions` are both empty: name at least one dataset.")
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"`benchmarks` and `questions` name {twice[0]!r} twice: datasets need different names.")
        if self.temperature == 0 and (self.num_samples > 1 or self.top_p < 1):
            raise ValueError(
                f"`temperature` is 0, which is greedy, but `num_samples` is {self.num_samples} and `top_p` "
                f"{self.top_p}: sampling needs a temperature above 0."
            )


def _mapping(given: dict[str, Any] | str | None) -> dict[str, Any]:
    """Read a mapping, which a recipe gives as such and a command line as JSON."""
    try:
        read = json.loads(given) if isinstance(given, str) else {} if given is None else given
    except ValueError:
        read = given
    if not isinstance(read, dict):
        raise ValueError(f"`chat_template_kwargs` is {given!r}, but must be a JSON object.")
    return read
