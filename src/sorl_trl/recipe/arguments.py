"""What a recipe and a command line may say: the arguments of `train.py`, parsed and checked."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

from trl import ModelConfig, TrlParser

from sorl_trl import qa
from sorl_trl.checks import POSITIVE_COUNT, Checked, OneOf, Problem, raise_first
from sorl_trl.command_line import DEBUG_EPILOG, command_name, parse_groups, reading, refuse, separate_config
from sorl_trl.diagnostics.collapse_guard import ACTIONS
from sorl_trl.rollout import EngineOptions, RolloutArguments
from sorl_trl.search import SearchArguments
from sorl_trl.search.arguments import override_source
from sorl_trl.trainers import SeeUPOConfig, SeeUPOTrainer, SOGRPOTrainer, SOPPOTrainer
from sorl_trl.trainers.base_config import TurnLevelConfig
from sorl_trl.trainers.base_trainer import TurnLevelTrainer
from sorl_trl.trainers.config_rules import SUM_THEN_NORMALIZE
from sorl_trl.trainers.options.backward_rules import turn_limit_problems

TRAINERS: dict[str, type[TurnLevelTrainer]] = {
    "so_grpo": SOGRPOTrainer,
    "so_ppo": SOPPOTrainer,
    "seeupo": SeeUPOTrainer,
}
KIND_ADVICE = "; `python -m sorl_trl.doctor --config RECIPE` names its line"


@dataclass
class TrainerArguments(Checked):
    """Which method trains the agent; the other arguments depend on it."""

    trainer: Annotated[str, OneOf(tuple(TRAINERS))] = field(
        default="so_grpo",
        metadata={
            "help": "'so_grpo': advantages from the group. 'so_ppo': advantages from a critic. 'seeupo': one turn "
            "after the other, the last one first."
        },
    )


@dataclass
class TaskArguments(Checked):
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
    collapse_guard: Annotated[str, OneOf(("off", *ACTIONS))] = field(
        default="warn",
        metadata={
            "help": "What to do when training seems to collapse: 'warn', 'stop', 'lower_lr', 'roll_back' to the last "
            "healthy checkpoint, or 'off'."
        },
    )

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        for name in ("train_questions", "eval_questions"):
            value = getattr(self, name)
            if value is not None and value not in qa.BENCHMARKS and not Path(value).is_file():
                what = f"`{name}` is {value!r}, but there is no such file, nor a public set of this name "
                yield Problem(name, f"{what}({', '.join(qa.BENCHMARKS)}).")
        trainable = [name for name, benchmark in qa.BENCHMARKS.items() if "train" in benchmark.sizes]
        if self.train_questions in qa.BENCHMARKS and self.train_questions not in trainable:
            what = f"`train_questions` is {self.train_questions!r}, which has no training split; these have one: "
            yield Problem("train_questions", f"{what}{', '.join(trainable)}.")
        names = [*qa.REWARDS]
        if not isinstance(self.rewards, list):  # a recipe may say `rewards: exact_match`
            example = self.rewards if self.rewards in names else "exact_match"
            what = f"`rewards` is {self.rewards!r}, but must be a list, such as [{example}]."
            yield Problem("rewards", what, [example])
        elif unknown := [name for name in self.rewards if name not in names]:
            yield Problem("rewards", f"`rewards` is {unknown}; choose from {names}.")
        elif not self.rewards:
            yield Problem("rewards", f"`rewards` is []; choose from {names}.")


def joint_problems(
    task: TaskArguments,
    config: TurnLevelConfig,
    rollout: RolloutArguments,
    search: SearchArguments,
    config_class: type[TurnLevelConfig],
) -> Iterator[Problem]:
    """What is wrong with arguments of the task, the trainer, the rollout and the search together."""
    if issubclass(config_class, SeeUPOConfig):
        where = f"`max_turns` {rollout.max_turns}, and a last generation"
        yield from turn_limit_problems(config.num_iterations, rollout.max_turns + 1, where)
    budget = config.max_completion_length
    if not POSITIVE_COUNT.allows(budget):
        what = f"`max_completion_length` is {budget}, but must be at least 1: trajectories need a limit."
        yield Problem("max_completion_length", what)
    per_turn = sorted(qa.TURN_REWARDS.intersection(task.rewards))
    if config.turn_boundary == "tags" and per_turn:
        what = f"`rewards` has {per_turn[0]!r}, one float per generation: `turn_boundary='tags'` makes more turns."
        yield Problem("rewards", what)
    if per_turn and config.multi_objective_aggregation != SUM_THEN_NORMALIZE:
        what = f"`multi_objective_aggregation` is {config.multi_objective_aggregation!r}, but `rewards` has "
        what += f"{per_turn[0]!r}, and turn rewards need {SUM_THEN_NORMALIZE!r}."
        yield Problem("multi_objective_aggregation", what, SUM_THEN_NORMALIZE)
    if search.no_search and "f1_plus" in task.rewards:
        what = "`rewards` has 'f1_plus', which takes 0.1 off a trajectory that has not searched, but with `no_search` "
        what += "nothing can be found: all would pay it or search in vain. Use 'f1'."
        yield Problem("rewards", what, ["f1" if name == "f1_plus" else name for name in task.rewards])


@dataclass
class Arguments:
    """Everything that a recipe and a command line say."""

    trainer_class: type[TurnLevelTrainer]
    task: TaskArguments
    rollout: RolloutArguments
    engine: EngineOptions
    search: SearchArguments
    config: TurnLevelConfig
    model: ModelConfig

    def __post_init__(self) -> None:
        raise_first(joint_problems(self.task, self.config, self.rollout, self.search, type(self.config)))


def argument_groups(trainer_class: type[TurnLevelTrainer]) -> tuple[type, ...]:
    """The dataclasses whose fields may stand in a recipe, in the order of `Arguments`."""
    return (TaskArguments, RolloutArguments, EngineOptions, SearchArguments, trainer_class.config_class, ModelConfig)


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
