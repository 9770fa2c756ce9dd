"""Our options: each says once what it is and what it may be, and its docstring says the same."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields
from typing import Any, get_args, get_type_hints

import pytest
from trl import GRPOConfig, TrlParser

from sorl_trl import SeeUPOConfig, SOGRPOConfig, SOPPOConfig
from sorl_trl.checks import Number, OneOf, Switch
from sorl_trl.diagnostics import GuardSettings
from sorl_trl.diagnostics.collapse_rules import Fall, Growth, Level
from sorl_trl.evaluation import EvaluationArguments
from sorl_trl.evaluation.checkpoint import ModelArguments
from sorl_trl.recipe import TaskArguments, TrainerArguments
from sorl_trl.rollout import EngineOptions, RetryPolicy, RolloutArguments, RolloutLimits
from sorl_trl.sandbox import ThinkingWarmStart, WarmStartConfig
from sorl_trl.sandbox.expert import ExpertNoise
from sorl_trl.sandbox.invented import Population
from sorl_trl.sandbox.policy import PolicyConfig
from sorl_trl.sandbox.world import WorldSize
from sorl_trl.search import SearchArguments
from sorl_trl.search.engines.encoder import DenseOptions
from sorl_trl.trainers.config_docs import own_fields
from sorl_trl.trainers.config_rules import ALLOWED_OF_TRL

CONFIGS = (SOGRPOConfig, SOPPOConfig, SeeUPOConfig)
ARGUMENTS = (
    *(TrainerArguments, TaskArguments, RolloutArguments, EngineOptions, SearchArguments),
    *(EvaluationArguments, ModelArguments),
)
SETTINGS = (
    *(RolloutLimits, RetryPolicy, GuardSettings, DenseOptions, Level, Fall, Growth),
    *(WarmStartConfig, ExpertNoise, ThinkingWarmStart, Population, PolicyConfig, WorldSize),
)
NO_RANGE = {
    "seed": "any whole number makes a generator",
    "threshold": "of a metric, which may be anything",
    "minimum": "of a metric too; `Fall` divides by it and says more",
    "hop_shares": "a tuple, which `WorldSize.problems` looks into",
}
CHOICES = {
    *("loss_type", "importance_sampling_level", "turn_ratio", "clip_normalization", "kl_estimator", "ctn_gate"),
    *("clip_range_scaling", "turn_reward_normalization"),
    *("turn_boundary", "advantage_level", "critic", "trainer", "collapse_guard", "protocol", "on_long_observation"),
    *("group_baseline", "group_filter"),
    *("rollout_engine", "search_engine", "search_request", "side", "dtype"),
}
"""Fields that are one of some names."""


def own(config_class: Any) -> list[Any]:
    return own_fields(config_class) if issubclass(config_class, GRPOConfig) else [*fields(config_class)]


def said_of(config_class: Any, name: str) -> list[Any]:
    hint = get_type_hints(config_class, include_extras=True)[name]
    inherited = [ALLOWED_OF_TRL[name]] if name in ALLOWED_OF_TRL and issubclass(config_class, GRPOConfig) else []
    return [*getattr(hint, "__metadata__", ()), *inherited]


def is_numeric(hint: Any) -> bool:
    return hint in (int, float) or any(is_numeric(each) for each in get_args(hint))


@pytest.mark.parametrize("config_class", [*CONFIGS, *ARGUMENTS, *SETTINGS])
def test_every_number_has_a_range_or_a_reason(config_class: Any) -> None:
    hints = get_type_hints(config_class)
    numeric = {each.name for each in own(config_class) if is_numeric(hints[each.name])}
    ranged = {name for name in numeric if any(isinstance(said, Number) for said in said_of(config_class, name))}
    assert numeric - ranged <= NO_RANGE.keys()


@pytest.mark.parametrize("config_class", [*CONFIGS, *ARGUMENTS, *SETTINGS])
def test_every_choice_names_its_names(config_class: Any) -> None:
    closed = {each.name for each in own(config_class)} & CHOICES
    assert {name for name in closed if any(isinstance(said, OneOf) for said in said_of(config_class, name))} == closed


@pytest.mark.parametrize("config_class", [*CONFIGS, *ARGUMENTS, *SETTINGS])
def test_every_switch_says_so(config_class: Any) -> None:
    """Else the text 'false', which is true, would switch it on."""
    hints = get_type_hints(config_class)
    switches = {each.name for each in own(config_class) if hints[each.name] is bool}
    said = {name for name in switches if any(isinstance(said, Switch) for said in said_of(config_class, name))}
    assert said == switches


@pytest.mark.parametrize("config_class", CONFIGS)
def test_a_text_is_no_switch(config_class: Any, tmp_path: Any) -> None:
    with pytest.raises(ValueError) as error:
        config_class(output_dir=str(tmp_path), use_cpu=True, bf16=False, disable_dropout="false")
    assert str(error.value) == "`disable_dropout` is 'false', but must be True or False."


@pytest.mark.parametrize("config_class", [*CONFIGS, *ARGUMENTS])
def test_the_names_are_in_the_help(config_class: Any) -> None:
    """Whoever reads `--help` or the docstring finds them there."""
    for each in own(config_class):
        names = [name for said in said_of(config_class, each.name) if isinstance(said, OneOf) for name in said.choices]
        assert [name for name in names if not re.search(rf"\b{name}\b", each.metadata["help"])] == [], each.name


@pytest.mark.parametrize("config_class", [*CONFIGS, *ARGUMENTS, *SETTINGS])
def test_defaults_are_allowed(config_class: Any) -> None:
    hints = get_type_hints(config_class)
    for each in own(config_class):
        if each.default in (MISSING, None):
            assert each.default is MISSING or type(None) in get_args(hints[each.name]), each.name
        else:
            assert all(said.allows(each.default) for said in said_of(config_class, each.name)), each.name


def parameters(config_class: Any) -> dict[str, tuple[str, str]]:
    """Name -> type with default, and text, as the docstring has them."""
    text = inspect.getdoc(config_class)
    assert text
    listed = text[text.index("\nParameters:\n") :]
    entries = re.findall(r"^    (\w+) \((.*)\):\n((?:        .*\n?)+)", listed, flags=re.MULTILINE)
    return {name: (described, " ".join(lines.split())) for name, described, lines in entries}


@pytest.mark.parametrize("config_class", CONFIGS)
def test_the_docstring_lists_what_we_add_and_change(config_class: Any) -> None:
    of_trl = {each.name: each for each in fields(GRPOConfig)}
    changed = {
        each.name
        for each in fields(config_class)
        if each.name not in of_trl
        or each.default != of_trl[each.name].default
        or each.metadata != of_trl[each.name].metadata
    }
    assert parameters(config_class).keys() == changed


@pytest.mark.parametrize("config_class", CONFIGS)
def test_the_docstring_says_what_the_fields_say(config_class: Any) -> None:
    hints, listed = get_type_hints(config_class), parameters(config_class)
    for each in own(config_class):
        described, text = listed[each.name]
        default = each.default_factory() if each.default is MISSING else each.default
        kinds = get_args(hints[each.name]) if type(None) in get_args(hints[each.name]) else (hints[each.name],)
        names = [kind.__name__ for kind in kinds if kind in (int, float, bool, str)] or ["list[str]"]
        assert described.startswith(f"`{names[0]}`"), each.name
        assert ("*optional*" in described) == (type(None) in kinds), each.name
        assert re.findall(r"defaults to `(.*)`", described) == ([] if default is None else [repr(default)]), each.name
        assert text == " ".join(each.metadata["help"].split()), each.name


@pytest.mark.parametrize("config_class", CONFIGS)
def test_trls_parser_takes_it(config_class: Any, tmp_path: Any) -> None:
    """As TRL's scripts do with `GRPOConfig`."""
    words = ["--output_dir", str(tmp_path), "--ctn_coef", "0.5", "--turn_ratio", "arithmetic", "--ctn_gate", "turn"]
    (config,) = TrlParser(config_class).parse_args_and_config([*words, "--use_cpu", "--bf16=false"])
    assert (config.ctn_coef, config.turn_ratio, config.ctn_gate) == (0.5, "arithmetic", "turn")
