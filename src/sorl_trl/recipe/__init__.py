"""A recipe: its arguments, and the trainer that is built of them. `train.py` reads recipes with it."""

from sorl_trl.recipe.arguments import Arguments, TaskArguments, TrainerArguments, argument_groups, parse_arguments
from sorl_trl.recipe.build import build_rollout, build_trainer, load_prompts, load_tokenizer
from sorl_trl.recipe.written import RecipeWriter, write_recipe

__all__ = [
    "Arguments",
    "RecipeWriter",
    "TaskArguments",
    "TrainerArguments",
    "argument_groups",
    "build_rollout",
    "build_trainer",
    "load_prompts",
    "load_tokenizer",
    "parse_arguments",
    "write_recipe",
]
