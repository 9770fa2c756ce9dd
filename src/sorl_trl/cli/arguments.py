"""The arguments of a recipe and of the command line of `sorl train`, parsed and checked."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.util import find_spec
from inspect import isclass
from typing import Annotated, Any

from trl import ModelConfig

from sorl_trl import qa
from sorl_trl.checks import POSITIVE_COUNT, SWITCH, OneOf, check_fields, did_you_mean, import_named, is_dotted
from sorl_trl.command_line import (
    RECIPES,
    mistakes,
    options_in,
    parse_dataclasses,
    read_config,
    take_options,
)
from sorl_trl.diagnostics.callbacks import ACTIONS
from sorl_trl.endpoint import agent_reward
from sorl_trl.evaluation.policy import ModelArguments, Parts
from sorl_trl.experimental import GroupRefillTrainer
from sorl_trl.methods import METHODS
from sorl_trl.rollout import EngineOptions, RolloutArguments
from sorl_trl.rollout.tasks import check_questions
from sorl_trl.search import SearchArguments
from sorl_trl.search.arguments import SOURCES
from sorl_trl.trainers import SOGRPOTrainer, SOPPOTrainer
from sorl_trl.trainers.base import TurnLevelTrainer
from sorl_trl.trainers.config import TurnLevelConfig

TRAINERS: dict[str, type[TurnLevelTrainer]] = {
    "so_grpo": SOGRPOTrainer,
    "so_ppo": SOPPOTrainer,
    "group_refill": GroupRefillTrainer,
}
AGENT_REWARD = "agent"
"""The name of the reward that an agent returns."""
REWARDS = {**qa.REWARDS, AGENT_REWARD: agent_reward}
TRACKERS = ("comet_ml", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")
"""Values of `report_to` that are also the names of their libraries."""


def reward_function(name: str) -> Any:
    """The reward function with this name or dotted path. A class is instantiated without arguments.

    Raises ValueError if there is no such function.
    """
    if name in REWARDS:
        return REWARDS[name]
    function = import_named("rewards", name)
    function = function() if isclass(function) else function
    if not callable(function):
        raise ValueError(f"`rewards` has {name!r}, but that is a {type(function).__name__}, not a function.")
    return function


@dataclass
class TrainerArguments:
    """The trainer, which determines the other arguments and their defaults, and its method."""

    trainer: Annotated[str, OneOf(tuple(TRAINERS))] = field(
        default="so_grpo",
        metadata={
            "help": "'so_grpo' takes advantages from the group, 'so_ppo' from a critic. One is experimental: "
            "'group_refill' replaces groups with equal rewards."
        },
    )
    method: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": f"The algorithm: a name ({', '.join(METHODS)}); a mapping of pieces that replace those that the "
            'other options describe, such as {"credit": "leave_one_out"}, or a method\'s, as in {"name": "loop", '
            '"gamma": 0.9}; or a dotted path. Default: what the options describe, with a KL penalty.'
        },
    )
    dry_run: Annotated[bool, SWITCH] = field(
        default=False,
        metadata={
            "help": "Build everything, ask the policy two questions, print what a training step would do, and exit."
        },
    )

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass
class TaskArguments:
    """The agent's questions and rewards, and the reaction to collapse."""

    train_questions: str = field(
        metadata={
            "help": "JSONL file of questions (`id`, `question`, `golden_answers`, optionally `options`, `metadata`). "
            "With an `environment` or an agent, rows may have a `prompt` and any columns."
        }
    )
    eval_questions: str | None = field(
        default=None,
        metadata={"help": "The same for evaluation (`eval_strategy`, `sorl evaluate`)."},
    )
    eval_limit: Annotated[int | None, POSITIVE_COUNT] = field(
        default=None,
        metadata={
            "help": "How many of `eval_questions`, evenly spaced and always the same, to ask in evaluations during "
            "training. Default: all. `sorl evaluate` always asks all."
        },
    )
    rewards: list[str] = field(
        default_factory=lambda: ["exact_match"],
        metadata={
            "help": f"Reward functions, summed with `reward_weights`: {', '.join(REWARDS)}, or dotted paths of your "
            "own, such as my_module.my_reward. Default: exact_match; with an agent, the reward that it returns."
        },
    )
    collapse_guard: Annotated[str, OneOf(("off", *ACTIONS))] = field(
        default="warn",
        metadata={
            "help": "What to do if training seems to collapse: 'warn', 'stop' (after writing a checkpoint), or 'off'."
        },
    )

    def __post_init__(self) -> None:
        check_fields(self)
        check_questions("train_questions", self.train_questions)
        names = self.rewards if isinstance(self.rewards, list) else []  # a recipe may set `rewards: exact_match`
        unknown = next((str(name) for name in names if name not in REWARDS and not is_dotted(name)), None)
        if not names or unknown is not None:
            raise ValueError(
                f"`rewards` must be a list of names from {', '.join(REWARDS)}, or of dotted paths, got "
                f"{unknown or self.rewards!r}{did_you_mean(unknown or '', REWARDS)}"
            )
        for name in names:
            reward_function(name)


@dataclass
class Arguments:
    """All arguments of a recipe and a command line."""

    trainer: TrainerArguments
    task: TaskArguments
    rollout: RolloutArguments
    engine: EngineOptions
    search: SearchArguments
    config: TurnLevelConfig
    model: ModelConfig
    given: dict[str, Any]
    """The values set by recipe and command line, by name. All others have their defaults."""

    @property
    def trainer_class(self) -> type[TurnLevelTrainer]:
        return TRAINERS[self.trainer.trainer]

    @cached_property
    def parts(self) -> Parts:
        """What asks the policy, for the trainer and for a dry run."""
        asked, trust = self.model, self.config.trust_remote_code
        model = ModelArguments(str(asked.model_name_or_path or ""), asked.model_revision, trust_remote_code=trust)
        lengths = self.config.max_completion_length, self.config.chat_template_kwargs or {}
        return Parts(model, self.rollout, self.engine, self.search, *lengths)

    @property
    def is_evaluated(self) -> bool:
        """Whether training evaluates the policy, before its first step or later."""
        return self.config.eval_strategy != "no" or bool(self.config.eval_on_start)

    def __post_init__(self) -> None:
        check_libraries(self.config)
        self.trainer_class.method_for(self.trainer.method, self.config)
        if self.rollout.has_agent and "rewards" not in self.given:
            self.task.rewards = [AGENT_REWARD]
        POSITIVE_COUNT.check("max_completion_length", self.config.max_completion_length)
        if self.config.logging_strategy == "no" and self.task.collapse_guard != "off":
            raise ValueError(
                "`logging_strategy` is 'no', but `collapse_guard` reads log entries: set `collapse_guard` to 'off'."
            )
        if self.is_evaluated:
            check_questions("eval_questions", self.task.eval_questions or "")
        if self.rollout.searches:
            self.search.check_sources()


def parse_arguments(words: Sequence[str] | None = None) -> Arguments:
    """Parse the command line, or `words`, and its `--config`: a file, or the name of a shipped recipe.

    `trainer` is parsed first, because it determines the other fields and their defaults.

    Raises:
        UserMistake: An argument is unknown or invalid, or the recipe cannot be read.
    """
    (config,), words = take_options(sys.argv[1:] if words is None else words, "config")
    recipe = {} if config is None else read_config(RECIPES.find(config), words, SOURCES)
    (trainer,), _ = take_options(words, "trainer", **recipe)
    with mistakes():
        trainer = TrainerArguments(trainer or TrainerArguments.trainer).trainer
        own = (TaskArguments, RolloutArguments, EngineOptions, SearchArguments)
        groups = (TrainerArguments, *own, TRAINERS[trainer].config_class, ModelConfig)  # as in `Arguments`
        usage = f"sorl train --trainer {trainer} [--config NAME_OR_PATH] [--OPTION VALUE ...]"
        if "save_steps" in options_in(words):
            recipe["save_strategy"] = "steps"  # a recipe that saves nothing would silently win over it
        parsed, given = parse_dataclasses(groups, words, recipe, usage)
        return Arguments(*[*parsed, {**recipe, **given}])


def check_libraries(config: TurnLevelConfig) -> None:
    """Raise ValueError for a missing library that would otherwise fail late or with a traceback."""
    asked = {"report_to": [name for name in config.report_to if name in TRACKERS]}
    asked["optim"] = ["bitsandbytes"] if "8bit" in config.optim else []
    for option, modules in asked.items():
        for module in modules:
            if find_spec(module) is None:
                raise ValueError(f"`{option}` needs {module}, which is not installed")
