"""Reads a recipe as `train.py` does, and goes on after the first mistake: each group of arguments by itself."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from trl import ModelConfig, TrlParser

from sorl_trl.doctor.findings import Finding
from sorl_trl.doctor.groups import below_one, mend_groups
from sorl_trl.doctor.kinds import replace_mistyped
from sorl_trl.doctor.parsing import parse, parse_around, unknown_arguments
from sorl_trl.doctor.recipe_file import RecipeFile
from sorl_trl.recipe import Arguments, TaskArguments, TrainerArguments, argument_groups
from sorl_trl.recipe.arguments import TRAINERS
from sorl_trl.rollout import RolloutArguments
from sorl_trl.search import SearchArguments
from sorl_trl.search.arguments import override_source
from sorl_trl.trainers.base_config import TurnLevelConfig

Group = TypeVar("Group")


@dataclass
class ReadArguments:
    """What could be read of a recipe; None where a group of arguments is refused."""

    raw: Any = None
    """Every argument as an attribute, before any of them is checked."""
    task: TaskArguments | None = None
    rollout: RolloutArguments | None = None
    search: SearchArguments | None = None
    config: TurnLevelConfig | None = None
    """As on one of `num_processes` processes; where only its groups do not fit, with others that do."""
    model: ModelConfig | None = None
    findings: list[Finding] = field(default_factory=list)


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
    parser = TrlParser([_unchecked(group) for group in classes])
    parsed, refused = parse_around(parser, words, recipe)
    read.findings += refused
    if parsed is None:
        return read
    *groups, unknown_in_file, unknown_words = parsed
    read.raw = SimpleNamespace(**dict(chain.from_iterable(vars(group).items() for group in groups)))
    read.raw.trainer = trainer
    read.findings += unknown_arguments(recipe, unknown_in_file[::2], unknown_words, {*vars(read.raw)})
    read.findings += replace_mistyped(recipe, read.raw, classes)
    _check_groups(recipe, read, TRAINERS[trainer].config_class, num_processes)
    _check_together(recipe, read, trainer)
    return read


def _unchecked(group: type) -> type:
    """A dataclass with the same fields that takes any values: one mistake must not hide the others."""
    return type(group.__name__, (group,), {"__post_init__": lambda self: None, "__doc__": group.__doc__})


def _choose_trainer(recipe: RecipeFile, words: Sequence[str], read: ReadArguments) -> str:
    parser = TrlParser(_unchecked(TrainerArguments), add_help=False, allow_abbrev=False)
    parsed = parse(parser, words)
    trainer = str(TrainerArguments.trainer if isinstance(parsed, str) else parsed[0].trainer)
    if trainer in TRAINERS:
        return trainer
    what = f"`trainer` is {trainer!r}, but must be one of {', '.join(TRAINERS)}; read on as so_grpo"
    read.findings.append(Finding("error", what, recipe.line("trainer", "so_grpo")))
    return "so_grpo"


def _check_groups(
    recipe: RecipeFile, read: ReadArguments, config_class: type[TurnLevelConfig], num_processes: int
) -> None:
    raw, changes = read.raw, _with_budget(recipe, read, config_class)
    read.task = _checked(TaskArguments, recipe, read)
    read.rollout = _checked(RolloutArguments, recipe, read)
    read.search = _checked(SearchArguments, recipe, read)
    read.model = _checked(ModelConfig, recipe, read)
    if uncountable := below_one(recipe, raw):
        read.findings += uncountable
        return
    changes |= _without_accelerator(raw, read.findings)
    for finding, mended in mend_groups(recipe, raw, num_processes):
        read.findings.append(finding)
        changes |= mended
    as_launched: type[TurnLevelConfig] = type(
        config_class.__name__, (config_class,), {"world_size": property(lambda self: num_processes)}
    )
    read.config = _checked(as_launched, recipe, read, changes)


def _with_budget(recipe: RecipeFile, read: ReadArguments, config_class: type[TurnLevelConfig]) -> dict[str, Any]:
    """A change that lets the config be checked without a `max_completion_length`, which is taken out of `read.raw`."""
    budget = read.raw.max_completion_length
    if budget is not None and budget >= 1:
        return {}
    what = f"`max_completion_length` is {budget}, but must be at least 1: trajectories need a limit"
    read.findings.append(Finding("error", what, recipe.line("max_completion_length")))
    read.raw.max_completion_length = None
    return {"max_completion_length": config_class.max_completion_length}


def _without_accelerator(raw: Any, findings: list[Finding]) -> dict[str, Any]:
    """Changes that let the other arguments be checked where there is none: on a laptop, on a login node."""
    if raw.use_cpu or torch.accelerator.is_available():
        return {}
    what = "this machine has no accelerator: whether that of the training has `bf16` and `fp16` is not checked"
    findings.append(Finding("skipped", what))
    return {"use_cpu": True, "bf16": False, "fp16": False}


def _checked(
    group: type[Group], recipe: RecipeFile, read: ReadArguments, changes: dict[str, Any] | None = None
) -> Group | None:
    """The group, or None and a finding. A warning about an argument that is set is a finding too."""
    known = {*vars(read.raw)}
    values = {each.name: getattr(read.raw, each.name) for each in fields(group) if each.init}  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", UserWarning)
        try:
            checked = group(**{**values, **(changes or {})})
        except Exception as error:  # whatever TRL or transformers raise for their own arguments
            message = str(error)
            read.findings.append(Finding("error", message, recipe.line_in(message, known)))
            return None
    for message in (str(warning.message) for warning in warned if issubclass(warning.category, UserWarning)):
        if recipe.has(recipe.argument_in(message, known)):
            read.findings.append(Finding("warning", message, recipe.line_in(message, known)))
    return checked


def _check_together(recipe: RecipeFile, read: ReadArguments, trainer: str) -> None:
    """What `Arguments` itself refuses."""
    if not (read.task and read.rollout and read.search and read.config and read.model):
        return
    try:
        Arguments(TRAINERS[trainer], read.task, read.rollout, read.search, read.config, read.model)
    except ValueError as error:
        read.findings.append(Finding("error", str(error), recipe.line_in(str(error), {*vars(read.raw)})))
