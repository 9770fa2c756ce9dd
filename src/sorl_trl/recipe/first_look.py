"""What is wrong with a command line and its recipe, as far as their words tell without the libraries.

Those define most options, and take seconds to import. What passes here may still be refused when it is parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from sorl_trl import qa
from sorl_trl.command_line import Parser, check_checkpoint, check_options, read_config, refuse, take_config
from sorl_trl.shipped import CONFIGS, RECIPES

COMMAND = "sorl train"
REQUIRED = ("train_questions", "model_name_or_path")
LIBRARIES = {
    "accelerate": ["commands/launch.py"],
    "transformers": ["training_args.py"],
    "trl": ["trainer/base_config.py", "trainer/grpo_config.py", "trainer/model_config.py"],
}
"""The files in which options are defined. A test holds this against the parsers."""


def look_over(words: Sequence[str], page: str) -> None:
    """Refuse an option that does not exist, and a file that is not there.

    Args:
        words: The command line.
        page: The help of the command, which names all options of ours.
    """
    config, words = take_config(words)
    if words and not words[0].startswith("-"):
        refuse(f"{words[0]!r} belongs to no argument of {COMMAND}")
    recipe = {} if config is None else read_config(RECIPES.find(config), words)
    parser = Parser(add_help=False)
    for name in (*REQUIRED, "trainer", "accelerate_config"):
        spellings = dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"])
        parser.add_argument(*spellings, default=recipe.get(name))
    said = vars(parser.parse_known_args(words)[0])
    with suppress(FileNotFoundError):  # where a library has moved its options, parsing alone tells
        _check_names([*(f"--{name}" for name in recipe), *words], said["trainer"] or "so_grpo", page)
    if said["accelerate_config"] is not None:
        CONFIGS.find(said["accelerate_config"])
    missing = [f"--{name}" for name in REQUIRED if said[name] is None]
    if missing:
        refuse(f"the following arguments are required: {', '.join(missing)}")
    check_questions("train_questions", str(said["train_questions"]))
    check_checkpoint(str(said["model_name_or_path"]))


def check_questions(name: str, value: str) -> None:
    """Raise ValueError unless `value` is a file or the name of a public set."""
    if value not in qa.BENCHMARKS and not Path(value).is_file():
        raise ValueError(
            f"`{name}` is {value!r}, but there is no such file, nor a public set of this name "
            f"({', '.join(qa.BENCHMARKS)})."
        )


def _check_names(words: Sequence[str], trainer: str, page: str) -> None:
    common, *rest = re.split(r"^with --trainer (\w+):$", page, flags=re.MULTILINE)
    sections = {name: _options(section) for name, section in zip(rest[::2], rest[1::2], strict=True)}
    known = _options(common) | sections.pop(trainer, set()) | options_of_libraries()
    of_others = {option: name for name, options in sections.items() for option in options - known}
    for option in (word.partition("=")[0] for word in words):
        if option in of_others:
            refuse(f"`{option}` is an argument of --trainer {of_others[option]}, but `trainer` is {trainer!r}")
    check_options(words, known, f"{COMMAND} --trainer {trainer}")


def _options(page: str) -> set[str]:
    return _spelt(re.findall(r"^  --(\w+)$", page, re.MULTILINE))


def options_of_libraries() -> set[str]:
    """Read from their source: fields of classes, and what stands in quotes after two dashes. Some are no options."""
    folders = {name: Path(str(getattr(find_spec(name), "origin", None))).parent for name in LIBRARIES}
    text = "".join((folders[name] / file).read_text("utf-8") for name, files in LIBRARIES.items() for file in files)
    return _spelt(field or option for field, option in re.findall(r'^    (\w+): |"--([\w-]+)"', text, re.MULTILINE))


def _spelt(names: Iterable[str]) -> set[str]:
    """With the forms that transformers adds to a name."""
    both = {f"--{form}{name}" for name in names for form in ("", "no_")}
    return both | {f"--{option[2:].replace('_', '-')}" for option in both}
