"""Reads a recipe as `train.py` does, and goes on after the first mistake: each group of arguments by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

from trl import TrlParser

from sorl_trl.doctor.findings import Finding
from sorl_trl.doctor.reading.checked_groups import ReadArguments, check_groups, unchecked
from sorl_trl.doctor.reading.kinds import replace_mistyped
from sorl_trl.doctor.reading.parsing import parse, parse_around, unknown_arguments
from sorl_trl.doctor.reading.recipe_file import RecipeFile
from sorl_trl.recipe import TrainerArguments, argument_groups
from sorl_trl.recipe.arguments import TRAINERS
from sorl_trl.search.arguments import override_source


def read_arguments(recipe: RecipeFile, words: Sequence[str], num_processes: int) -> ReadArguments:
    """Read the command line `words`, with its `--config`, for so many processes."""
    read = ReadArguments()
    read.findings += [
        Finding("warning", f"`{key}` stands in lines {', '.join(map(str, lines))}; the last counts", recipe.line(key))
        for key, lines in recipe.repeated.items()
    ]
    words = override_source(words)
    trainer = _choose_trainer(recipe, words, read)
    classes = (TrainerArguments, *argument_groups(TRAINERS[trainer]))
    parser = TrlParser([unchecked(group) for group in classes])
    parsed, refused = parse_around(parser, words, recipe)
    read.findings += refused
    if parsed is None:
        return read
    *groups, unknown_in_file, unknown_words = parsed
    read.raw = SimpleNamespace(**dict(chain.from_iterable(vars(group).items() for group in groups)))
    read.raw.trainer = trainer
    read.findings += unknown_arguments(recipe, unknown_in_file[::2], unknown_words, {*vars(read.raw)})
    read.findings += replace_mistyped(recipe, read.raw, classes)
    check_groups(recipe, read, TRAINERS[trainer].config_class, num_processes)
    return read


def _choose_trainer(recipe: RecipeFile, words: Sequence[str], read: ReadArguments) -> str:
    parser = TrlParser(unchecked(TrainerArguments), add_help=False, allow_abbrev=False)
    parsed = parse(parser, words)
    choice = unchecked(TrainerArguments)() if isinstance(parsed, str) else parsed[0]
    for problem in choice.problems():
        what = f"{problem.what} Read on as so_grpo."
        read.findings.append(recipe.finding(replace(problem, what=what, proposal=TrainerArguments.trainer)))
        return TrainerArguments.trainer
    return str(choice.trainer)
