"""What is wrong with each group of arguments: all of it, where `train.py` stops at the first."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch
from trl import ModelConfig

from sorl_trl.checks import UNSET, Checked, Problem
from sorl_trl.doctor.findings import Finding
from sorl_trl.doctor.reading.groups import mend_groups
from sorl_trl.doctor.reading.kinds import default
from sorl_trl.doctor.reading.recipe_file import RecipeFile
from sorl_trl.recipe import TaskArguments
from sorl_trl.recipe.arguments import joint_problems
from sorl_trl.rollout import EngineOptions, RolloutArguments
from sorl_trl.search import SearchArguments
from sorl_trl.trainers.base_config import TurnLevelConfig
from sorl_trl.trainers.config_rules import COUNTS

Group = TypeVar("Group")
CheckedGroup = TypeVar("CheckedGroup", bound=Checked)


@dataclass
class ReadArguments:
    """What could be read of a recipe; None where a group of arguments is refused."""

    raw: Any = None
    """Every argument as an attribute, before any of them is checked."""
    task: TaskArguments | None = None
    rollout: RolloutArguments | None = None
    engine: EngineOptions | None = None
    search: SearchArguments | None = None
    config: TurnLevelConfig | None = None
    """As on one of `num_processes` processes; where only its groups do not fit, with others that do."""
    model: ModelConfig | None = None
    findings: list[Finding] = field(default_factory=list)


def unchecked(group: type[Group]) -> type[Group]:
    """A dataclass with the same fields that takes any values: one mistake must not hide the others."""
    return type(group.__name__, (group,), {"__post_init__": lambda self: None, "__doc__": group.__doc__})


def check_groups(
    recipe: RecipeFile, read: ReadArguments, config_class: type[TurnLevelConfig], num_processes: int
) -> None:
    """Fill in the groups of `read`, and its findings, in the order in which `train.py` checks them."""
    read.task = _checked(TaskArguments, recipe, read)
    read.rollout = _constructed(RolloutArguments, recipe, read, _values(RolloutArguments, read.raw))
    read.engine = _constructed(EngineOptions, recipe, read, _values(EngineOptions, read.raw))
    read.search = _checked(SearchArguments, recipe, read)
    joint = [*joint_problems(read.raw, read.raw, read.raw, read.raw, config_class)]
    _check_config(recipe, read, config_class, num_processes, joint)
    read.model = _constructed(ModelConfig, recipe, read, _values(ModelConfig, read.raw))
    read.findings += map(recipe.finding, joint)
    if any(problem.option == "max_completion_length" for problem in joint):
        read.raw.max_completion_length = None


def _check_config(
    recipe: RecipeFile,
    read: ReadArguments,
    config_class: type[TurnLevelConfig],
    num_processes: int,
    joint: list[Problem],
) -> None:
    """The trainer's config. What we refuse is mended, so that TRL and transformers have their say too."""
    values = _values(config_class, read.raw)
    own = [*unchecked(config_class)(**values).problems()]
    read.findings += map(recipe.finding, own)
    if any(problem.option in COUNTS for problem in own):
        return
    values |= _without_accelerator(read)
    for finding, mended in mend_groups(recipe, read.raw, num_processes):
        read.findings.append(finding)
        values |= mended
    values |= _mended(config_class, [*own, *joint])
    if [*unchecked(config_class)(**values).problems()]:
        return
    as_launched: type[TurnLevelConfig] = type(
        config_class.__name__, (config_class,), {"world_size": property(lambda self: num_processes)}
    )
    read.config = _constructed(as_launched, recipe, read, values)


def _mended(group: type, problems: list[Problem]) -> dict[str, Any]:
    """The arguments of the group that have problems, with what is proposed for them, else with their defaults."""
    known = {each.name: each for each in fields(group)}
    return {
        each.option: default(known[each.option]) if each.proposal is UNSET else each.proposal
        for each in problems
        if each.option in known
    }


def _without_accelerator(read: ReadArguments) -> dict[str, Any]:
    """Changes that let the other arguments be checked where there is none: on a laptop, on a login node."""
    if read.raw.use_cpu or torch.accelerator.is_available():
        return {}
    what = "this machine has no accelerator: whether that of the training has `bf16` and `fp16` is not checked"
    read.findings.append(Finding("skipped", what))
    return {"use_cpu": True, "bf16": False, "fp16": False}


def _checked(group: type[CheckedGroup], recipe: RecipeFile, read: ReadArguments) -> CheckedGroup | None:
    """The group, or None and all its problems."""
    values = _values(group, read.raw)
    problems = [*unchecked(group)(**values).problems()]
    read.findings += map(recipe.finding, problems)
    return None if problems else group(**values)


def _constructed(group: type[Group], recipe: RecipeFile, read: ReadArguments, values: dict[str, Any]) -> Group | None:
    """The group, whose class refuses one thing at a time: what it names is set to its default for the next attempt.

    None where a message names nothing that could be. A message about what has been set so is a consequence, no
    finding. A warning about an argument that is set is a finding too.
    """
    known, reset = {each.name: each for each in fields(group)}, set[str]()  # type: ignore[arg-type]
    while True:
        try:
            made, warned = _made_with_warnings(group, values)
        except Exception as error:  # whatever TRL or transformers raise for their own arguments
            message = str(error)
            name = recipe.argument_in(message, known.keys()) or _quoted(message, values, recipe)
            if not any(_mentions(message, each) for each in reset):
                read.findings.append(Finding("error", message, recipe.line(name) if name else ""))
            if name in reset or not recipe.has(name):
                return None
            values = {**values, name: default(known[name])}
            reset.add(name)
        else:
            read.findings += [
                Finding("warning", message, recipe.line_in(message, {*vars(read.raw)}))
                for message in warned
                if recipe.has(recipe.argument_in(message, {*vars(read.raw)}))
            ]
            return made


def _made_with_warnings(group: type[Group], values: dict[str, Any]) -> tuple[Group, list[str]]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", UserWarning)
        made = group(**values)
    return made, [str(warning.message) for warning in warned if issubclass(warning.category, UserWarning)]


def _mentions(message: str, name: str) -> bool:
    """Whether it is about an argument, perhaps in plain words: "the eval strategy"."""
    words = " ".join(re.findall(r"[^\W_]+", message)).lower()
    return f" {name.replace('_', ' ')} " in f" {words} "


def _quoted(message: str, values: dict[str, Any], recipe: RecipeFile) -> str:
    """The argument of a message that names its value alone, as an enumeration's does; "" where there are several."""
    found = [
        name for name, value in values.items() if recipe.has(name) and message.startswith((f"{value} ", f"{value!r} "))
    ]
    return found[0] if len(found) == 1 else ""


def _values(group: type, raw: Any) -> dict[str, Any]:
    return {each.name: getattr(raw, each.name) for each in fields(group) if each.init}
