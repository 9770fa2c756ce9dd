"""Writes `recipe.yaml` beside the results of training, with which a run can be evaluated and repeated."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sorl_trl.command_line import UserMistake
from sorl_trl.files import write_whole
from sorl_trl.recipe.arguments import Arguments
from sorl_trl.records import RECIPE_FILE
from sorl_trl.rollout.tasks import FOR_QUESTIONS, unread
from sorl_trl.shipped import package_version
from sorl_trl.text import without_user
from sorl_trl.trainers.checkpoint import RESTORED

SECRET = "_token"
"""Arguments whose names end like this are secrets, as in transformers."""
OF_ONE_START = ("dry_run", "resume_from_checkpoint")
"""Arguments that say what to do with a run, not what it is."""
PATHS = (
    *("model_name_or_path", "critic_model_name_or_path"),
    *("train_questions", "eval_questions", "corpus", "index", "search_cache"),
)
"""Arguments that may be paths. They are written as absolute paths, so that they are valid from anywhere."""


def recipe_of(arguments: Arguments) -> dict[str, Any]:
    """What recipe and command line set, and all that shapes the agent, because its defaults may change.

    If a resumed run takes a value from its checkpoint, that value is written.
    """
    config = arguments.config
    agent = {name: value for name, value in asdict(arguments.rollout).items() if value is not None}
    if not arguments.rollout.searches:
        for name in {*unread(arguments.rollout), *FOR_QUESTIONS} & {*agent}:
            del agent[name]
    written = {**agent, **arguments.given, "trainer": arguments.trainer.trainer}
    for name in ("max_completion_length", *RESTORED):
        if hasattr(config, name):
            written[name] = getattr(config, name)
    kept = [name for name in written if not name.endswith(SECRET) and name not in OF_ONE_START]
    return {name: _written(name, written[name]) for name in kept}


def _written(name: str, value: Any) -> Any:
    """A value without the user of a URL, who may have a password."""
    if not isinstance(value, str):
        return value
    return str(Path(value).resolve()) if name in PATHS and Path(value).exists() else without_user(value)


def write_recipe(arguments: Arguments, folder: Path) -> None:
    """Write `recipe.yaml` into the output folder of a run, which is made if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    text = yaml.safe_dump(recipe_of(arguments), sort_keys=False, allow_unicode=True)
    head = f"# What trained the policy in this folder, with sorl-trl {package_version()}.\n"
    write_whole(folder / RECIPE_FILE, (head + text).encode("utf-8"))


class RecipeWriter(TrainerCallback):
    """Writes the recipe when training begins, because only then a resumed run has its checkpoint's values."""

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments
        self.written: Path | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        folder = Path(str(args.output_dir))
        if state.is_world_process_zero:
            if args.resume_from_checkpoint is None and (folder / RECIPE_FILE).exists():
                raise UserMistake(f"`output_dir` is {folder}, in which another run has just begun")
            write_recipe(self.arguments, folder)
            self.written = None if args.resume_from_checkpoint else folder / RECIPE_FILE

    def take_back(self) -> None:
        """Remove the recipe of a run that ended before its first step, so that its folder is free again."""
        if self.written is not None:
            self.written.unlink(missing_ok=True)
