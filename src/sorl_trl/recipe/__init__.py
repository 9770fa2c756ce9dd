"""A recipe: its arguments, and the trainer that is built of them. `train.py` and the doctor read recipes with it."""

from sorl_trl.recipe.arguments import Arguments, TaskArguments, TrainerArguments, argument_groups, parse_arguments
from sorl_trl.recipe.build import build_rollout, build_trainer, load_prompts

__all__ = [
    "Arguments",
    "TaskArguments",
    "TrainerArguments",
    "argument_groups",
    "build_rollout",
    "build_trainer",
    "load_prompts",
    "parse_arguments",
]
