"""Finds mistakes in a command line and its recipe without importing the libraries that define most options.

Those take seconds to import. What passes here may still be refused when it is parsed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from sorl_trl import qa
from sorl_trl.command_line import Parser, check_checkpoint, read_config, refuse, take_config
from sorl_trl.files import missing
from sorl_trl.shipped import CONFIGS, RECIPES

COMMAND = "sorl train"


def look_over(words: Sequence[str]) -> None:
    """Raise UserMistake or ValueError for a file or folder that does not exist."""
    config, words = take_config(words)
    if config is None and not words:
        refuse(f"{COMMAND} needs --train_questions and --model_name_or_path, or a --config that sets them")
    if words and not words[0].startswith("-"):
        refuse(f"{words[0]!r} belongs to no argument of {COMMAND}")
    recipe = {} if config is None else read_config(RECIPES.find(config), words)
    parser = Parser(add_help=False)
    for name in CHECKS:
        spellings = dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"])
        parser.add_argument(*spellings, default=recipe.get(name))
    said = vars(parser.parse_known_args(words)[0])
    for name, check in CHECKS.items():
        if said[name] is not None:
            check(said[name])


def check_questions(name: str, value: str) -> None:
    """Raise ValueError unless `value` is a file or the name of a public set."""
    if value not in qa.BENCHMARKS and not Path(value).is_file():
        raise ValueError(missing(name, value, f"file, nor a public set of this name ({', '.join(qa.BENCHMARKS)})"))


CHECKS: dict[str, Callable[[str], object]] = {
    "accelerate_config": CONFIGS.find,
    "train_questions": partial(check_questions, "train_questions"),
    "model_name_or_path": check_checkpoint,
}
"""The functions that refuse a value that does not exist, by argument."""
