"""Parses a command line and its `--config` to the end, around the arguments that are refused."""

from __future__ import annotations

import io
import re
from argparse import Action
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from trl import TrlParser

from sorl_trl.doctor.findings import Finding
from sorl_trl.doctor.reading.kinds import default
from sorl_trl.doctor.reading.recipe_file import RecipeFile


def parse(parser: TrlParser, words: Sequence[str]) -> tuple[Any, ...] | str:
    """The groups, the words of the recipe and those of the command line that no group knows; or what was refused."""
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            parsed: tuple[Any, ...] = parser.parse_args_and_config(
                words, return_remaining_strings=True, separate_remaining_strings=True
            )
    except SystemExit:
        return said.getvalue().strip().rpartition("error: ")[2]
    except ValueError as error:
        return str(error)
    return parsed


def parse_around(
    parser: TrlParser, words: Sequence[str], recipe: RecipeFile
) -> tuple[tuple[Any, ...] | None, list[Finding]]:
    """As `parse`, but an argument that is refused or missing gets its default, and the others are parsed all the same.

    Returns:
        What `parse` returns, None if a message names no argument to go around, and a finding for every message.
    """
    findings: list[Finding] = []
    loosened: set[Action] = set()
    while isinstance(parsed := parse(parser, words), str):
        refused = [action for action in _named(parser, parsed) if action not in loosened]
        names = {action.dest for action in parser._actions}
        line = recipe.line(refused[0].dest) if refused else recipe.line_in(parsed, names)
        findings.append(Finding("error", parsed, line))
        if not refused:
            return None, findings
        for action in refused:
            _loosen(action)
        loosened.update(refused)
    _reset(parsed[:-2], {action.dest for action in loosened})
    return parsed, findings


def _named(parser: TrlParser, message: str) -> list[Action]:
    """The arguments that a message of argparse is about: one whose value is refused, or all that are missing."""
    head, _, tail = message.partition(": ")
    options = {*re.findall(r"--[\w-]+", tail if head.endswith("are required") else head)}
    return [action for action in parser._actions if not options.isdisjoint(action.option_strings)]


def _loosen(action: Action) -> None:
    """Let the argument be given with whatever was refused, or not at all."""
    action.nargs = "*" if action.nargs == "+" else "?"
    action.type, action.choices, action.required = str, None, False


def _reset(groups: Iterable[Any], names: set[str]) -> None:
    for group in groups:
        for argument in fields(group):
            if argument.name in names:
                setattr(group, argument.name, default(argument))


def unknown_arguments(
    recipe: RecipeFile, keys: Sequence[str], words: Sequence[str], known: set[str]
) -> Iterator[Finding]:
    """What no group knows: keys of the recipe, arguments of the command line, and words that belong to no argument.

    Words behind an unknown argument of the command line are taken for its values.
    """
    for key in keys:
        yield _unknown(recipe, key, known)
    first = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
    for word in words[:first]:
        yield Finding("error", f"{word!r} belongs to no argument of train.py", f"{word}  (command line)")
    for word in words[first:]:
        if word.startswith("--"):
            yield _unknown(recipe, word, known)


def _unknown(recipe: RecipeFile, word: str, known: set[str]) -> Finding:
    name = word.lstrip("-").partition("=")[0]
    close = get_close_matches(name, known, n=1)
    hint = f"; is it `{close[0]}`?" if close else ""
    return Finding("error", f"`{name}` is no argument of train.py{hint}", recipe.line(name))
