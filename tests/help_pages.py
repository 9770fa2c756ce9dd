"""The pages that `sorl COMMAND --help` prints for commands whose arguments take seconds to import.

    python -m tests.help_pages

writes them, from the dataclasses that the commands parse.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout, suppress
from dataclasses import MISSING, Field, fields
from io import StringIO
from typing import Any

from trl import ModelConfig

from sorl_trl import SOGRPOConfig
from sorl_trl.cli import quickstart
from sorl_trl.cli.main import HELP
from sorl_trl.evaluation.arguments import GROUPS
from sorl_trl.recipe.arguments import TRAINERS, TaskArguments, TrainerArguments
from sorl_trl.rollout import EngineOptions, RolloutArguments
from sorl_trl.search import SearchArguments
from sorl_trl.trainers.config import TurnLevelConfig

WIDTH = 100
THAT_MATTER = (
    *("model_name_or_path", "train_questions", "output_dir", "max_steps", "learning_rate", "num_generations"),
    *("per_device_train_batch_size", "steps_per_generation", "num_iterations", "max_completion_length"),
)
TRAIN = """\
usage: sorl train [--accelerate_config NAME_OR_PATH] [--config NAME_OR_PATH] [--OPTION VALUE ...]

Trains an agent through `accelerate launch`. `--dry_run` tries the same command out. A recipe may set every option
below; options of `accelerate launch`, such as --num_processes 2, go to the launcher. `--help all` lists all options,
including TRL's.

  --accelerate_config
      a YAML file of accelerate, or the name of one of ours (`sorl configs` lists them); by default the file that
      `accelerate config` wrote
  --config
      the recipe: a YAML file, or the name of one of ours (`sorl recipes` lists them)
"""
EVALUATE = """\
usage: sorl evaluate RUN [--config NAME_OR_PATH] [--OPTION VALUE ...]

Asks a policy questions, scores it, prints a table, and writes results and trajectories into RUN/evaluation. RUN
is the output folder of `sorl train`, a checkpoint in it, or a PEFT adapter's folder. The prompt, the questions and the
search come from RUN or from `--config`, and options override them; the defaults below apply where neither sets a
value. For any other model, name the questions and the search, and for a Hub id also `--output`.

example: sorl evaluate runs/so_grpo --limit 100
"""


def entry(field: Field[Any]) -> str:
    """An option: its name, its help, and a default that is short."""
    made = field.default_factory() if field.default_factory is not MISSING else field.default
    default = "required" if made is MISSING else f"default: {made!r}"
    shown = f" ({default})" if len(default) < 60 and "efault" not in field.metadata["help"] else ""
    said = " ".join(str(field.metadata["help"]).replace("%%", "%").split()) + shown
    indent = " " * 6
    return f"  --{field.name}\n" + textwrap.fill(said, WIDTH, initial_indent=indent, subsequent_indent=indent)


def section(title: str, options: Iterable[Field[Any]]) -> str:
    return "\n".join([f"\n{title}:", *map(entry, options)])


def train_page() -> str:
    groups = (TaskArguments, SOGRPOConfig, ModelConfig)
    every = {field.name: field for group in groups for field in fields(group)}
    ours = {"the trainer": TrainerArguments, "the task": TaskArguments, "the agent": RolloutArguments}
    ours |= {"the engine of rollouts": EngineOptions, "the search": SearchArguments}
    sections = [section("ten that matter first", [every[name] for name in THAT_MATTER])]
    sections += [section(title, of_names(group, group.__annotations__)) for title, group in ours.items()]
    sections.append(
        section("training, with every trainer", of_names(TurnLevelConfig, TurnLevelConfig.__annotations__))
    )
    for name, trainer in TRAINERS.items():
        own = of_names(trainer.config_class, trainer.config_class.__annotations__)
        sections += [section(f"with --trainer {name}", own)] if own else []
    return "\n".join([TRAIN.rstrip("\n"), *sections, ""])


def of_names(group: type, names: Mapping[str, Any]) -> list[Field[Any]]:
    return [field for field in fields(group) if field.name in names and field.name not in THAT_MATTER]


def evaluate_page() -> str:
    options = [field for group in GROUPS for field in fields(group) if field.name != "model_name_or_path"]
    return "\n".join([EVALUATE.rstrip("\n"), section("options", options), ""])


def quickstart_page() -> str:
    """As argparse prints it."""
    shown = StringIO()
    with redirect_stdout(shown), suppress(SystemExit):
        quickstart.parse_arguments(["--help"])
    return shown.getvalue()


PAGES = {"train": train_page, "evaluate": evaluate_page, "quickstart": quickstart_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (HELP / f"{name}.txt").write_text(page(), encoding="utf-8")
