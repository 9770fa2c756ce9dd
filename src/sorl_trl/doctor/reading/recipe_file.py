"""Where in a recipe an argument stands."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from sorl_trl.checks import UNSET, Problem
from sorl_trl.doctor.findings import Finding, Level

KEY_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")
"""Of text, and of `<<`, which merges another mapping."""


@dataclass(frozen=True)
class RecipeFile:
    """The lines of a YAML file, and what the command line says in their place."""

    path: str
    lines: Mapping[str, int]
    """Key -> its line, counted from 1; of a key that stands twice the last, which counts."""
    repeated: Mapping[str, Sequence[int]]
    """Key -> all its lines, for keys that stand more than once."""
    overridden: frozenset[str]
    """Arguments of the command line."""

    def line(self, name: str, value: object = UNSET) -> str:
        """`name: value  (recipe.yaml line 14)`: where the argument stands, and what to write there."""
        text = "" if value is UNSET else value if isinstance(value, str) else json.dumps(value)
        if name in self.overridden:
            return f"--{name} {text}".rstrip() + "  (command line)"
        place = f"{self.path} line {self.lines[name]}" if name in self.lines else f"not in {self.path} yet"
        return (name if value is UNSET else f"{name}: {text}") + f"  ({place})"

    def finding(self, problem: Problem, level: Level = "error") -> Finding:
        """The problem, with the line to change."""
        return Finding(level, problem.what, self.line(problem.option, problem.proposal))

    def has(self, name: str) -> bool:
        """Whether the argument is set, here or on the command line."""
        return name in self.overridden or name in self.lines

    def argument_in(self, message: str, arguments: Collection[str]) -> str:
        """The one of `arguments` that an error message is about, or "".

        Names in backticks go before words, and what is set before what is not: many words are arguments too.
        """
        words = [*re.findall(r"`(\w+)", message), *re.findall(r"\w+", message)]
        named = [name for name in words if name in arguments]
        return next(filter(self.has, named), next(iter(named), ""))

    def line_in(self, message: str, arguments: Collection[str]) -> str:
        """The line of that argument, or ""."""
        name = self.argument_in(message, arguments)
        return self.line(name) if name else ""


def read_recipe(path: str, words: Sequence[str]) -> RecipeFile:
    """Find the lines of a recipe.

    Args:
        path: The YAML file.
        words: The rest of the command line.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no YAML mapping; the message names the file and, where it can, the line.
    """
    lines: dict[str, list[int]] = {}
    for key, _ in _read_mapping(path).value:
        number = key.start_mark.line + 1
        if key.tag not in KEY_TAGS:
            raise ValueError(f"{path} line {number}: a key must be the name of an argument, which this is not")
        lines.setdefault(key.value, []).append(number)
    given = {word.lstrip("-").partition("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    return RecipeFile(
        path,
        {key: found[-1] for key, found in lines.items()},
        {key: found for key, found in lines.items() if len(found) > 1},
        frozenset(given),
    )


def _read_mapping(path: str) -> yaml.MappingNode:
    """The mapping with its lines. What it holds is read too: some mistakes are seen only then."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        yaml.safe_load(text)
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ValueError(f"{path} line {mark.line + 1 if mark else '?'}: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"{path} must be a YAML mapping from arguments to values")
    return root
