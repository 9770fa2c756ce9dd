"""What a recipe and a command line may say: the arguments of `train.py`, parsed and checked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from trl import ModelConfig, TrlParser

from sorl_trl import qa
from sorl_trl.command_line import DEBUG_EPILOG, command_name, parse_groups, reading, refuse, separate_config
from sorl_trl.diagnostics.collapse_guard import ACTIONS
from sorl_trl.rollout import RolloutArguments
from sorl_trl.search import SearchArguments
from sorl_trl.search.arguments import override_source
from sorl_trl.trainers import SOGRPOTrainer, SOPPOTrainer
from sorl_trl.trainers.base_config import TurnLevelConfig
from sorl_trl.trainers.base_trainer import TurnLevelTrainer

TRAINERS: dict[str, type[TurnLevelTrainer]] = {"so_grpo": SOGRPOTrainer, "so_ppo": SOPPOTrainer}
KIND_ADVICE = "; `python -m sorl_trl.doctor --config RECIPE` names its line"


@dataclass
class TrainerArguments:
    """Which method trains the agent; the other arguments depend on it."""

    trainer: str = field(
        default="so_grpo",
        metadata={"help": "'so_grpo': advantages from the group. 'so_ppo': advantages from a critic."},
    )

    def __post_init__(self) -> None:
        if self.trainer not in TRAINERS:
            raise ValueError(f"`trainer` is {self.trainer!r}, but must be one of {', '.join(TRAINERS)}.")


@dataclass
class TaskArguments:
    """What the agent is asked, what it is rewarded for, and what to do if it gets worse."""

    train_questions: str = field(
        metadata={
            "help": "JSONL file of questions (`id`, `question`, `golden_answers`, perhaps `options`, `metadata`), or "
            f"a public set by name, of which the training split is taken: {', '.join(qa.BENCHMARKS)}."
        }
    )
    eval_questions: str | None = field(
        default=None,
        metadata={"help": "The same for `eval_strategy`; of a public set its evaluation split is taken."},
    )
    rewards: list[str] = field(
        default_factory=lambda: ["exact_match"],
        metadata={"help": f"Reward functions, summed with `reward_weights`: {', '.join(qa.REWARDS)}."},
    )
    collapse_guard: str = field(
        default="warn",
        metadata={
            "help": "What to do when training seems to collapse: 'warn', 'stop', 'lower_lr', 'roll_back' to the last "
            "healthy checkpoint, or 'off'."
        },
    )

    def __post_init__(self) -> None:
        for name in ("train_questions", "eval_questions"):
            value = getattr(self, name)
            if value is not None and value not in qa.BENCHMARKS and not Path(value).is_file():
                raise ValueError(
                    f"`{name}` is {value!r}, but there is no such file, nor a public set of this name "
                    f"({', '.join(qa.BENCHMARKS)})."
                )
        trainable = [name for name, benchmark in qa.BENCHMARKS.items() if "train" in benchmark.sizes]
        if self.train_questions in qa.BENCHMARKS and self.train_questions not in trainable:
            raise ValueError(
                f"`train_questions` is {self.train_questions!r}, which has no training split; "
                f"these have one: {', '.join(trainable)}."
            )
        if self.collapse_guard not in ("off", *ACTIONS):
            raise ValueError(
                f"`collapse_guard` is {self.collapse_guard!r}, but must be one of off, {', '.join(ACTIONS)}."
            )
        names = [*qa.REWARDS]
        if not isinstance(self.rewards, list):  # a recipe may say `rewards: exact_match`
            example = self.rewards if self.rewards in names else "exact_match"
            raise ValueError(f"`rewards` is {self.rewards!r}, but must be a list, such as [{example}].")
        if not self.rewards or (unknown := [name for name in self.rewards if name not in names]):
            raise ValueError(f"`rewards` is {unknown if self.rewards else []}; choose from {names}.")


@dataclass
class Arguments:
    """Everything that a recipe and a command line say."""

    trainer_class: type[TurnLevelTrainer]
    task: TaskArguments
    rollout: RolloutArguments
    search: SearchArguments
    config: TurnLevelConfig
    model: ModelConfig

    def __post_init__(self) -> None:
        budget = self.config.max_completion_length
        if budget is None or budget < 1:
            raise ValueError(
                f"`max_completion_length` is {budget}, but must be at least 1: trajectories need a limit."
            )
        per_turn = sorted(qa.TURN_REWARDS.intersection(self.task.rewards))
        if self.config.turn_boundary == "tags" and per_turn:
            raise ValueError(
                f"`rewards` has {per_turn[0]!r}, one float per generation: `turn_boundary='tags'` makes more turns."
            )


def argument_groups(trainer_class: type[TurnLevelTrainer]) -> tuple[type, ...]:
    """The dataclasses whose fields may stand in a recipe, in the order of `Arguments`."""
    return (TaskArguments, RolloutArguments, SearchArguments, trainer_class.config_class, ModelConfig)


def _arguments_of_others(trainer_class: type[TurnLevelTrainer]) -> dict[str, str]:
    """Argument -> the trainer that has it, where the chosen one has not."""
    own = {argument.name for argument in fields(trainer_class.config_class)}
    of_all = {each.name: name for name, trainer in TRAINERS.items() for each in fields(trainer.config_class)}
    return {name: f"--trainer {trainer}" for name, trainer in of_all.items() if name not in own}


class RecipeParser(TrlParser):  # type: ignore[misc]
    """A mistake is a `UserMistake`, in one line."""

    error = refuse


def parse_arguments(words: Sequence[str] | None = None) -> Arguments:
    """Parse the command line, or `words`, and its `--config`: `trainer` first, for its config has the other fields.

    Raises:
        UserMistake: an argument is unknown or refused, or the recipe cannot be read.
    """
    words = override_source(separate_config(sys.argv[1:] if words is None else words))
    first_look = RecipeParser(TrainerArguments, add_help=False, allow_abbrev=False)
    with reading(KIND_ADVICE):
        choice, _ = first_look.parse_args_and_config(words, return_remaining_strings=True)
    trainer_class = TRAINERS[choice.trainer]
    command = command_name("train.py")
    parser = RecipeParser((TrainerArguments, *argument_groups(trainer_class)), prog=command, epilog=DEBUG_EPILOG)
    groups = parse_groups(parser, words, command, _arguments_of_others(trainer_class), KIND_ADVICE)
    with reading(KIND_ADVICE):
        return Arguments(trainer_class, *groups[1:])
