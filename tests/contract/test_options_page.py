"""docs/options.md against TRL and the code: every option has a row, and every row a test that shows what it says."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments
from trl import GRPOConfig, GRPOTrainer

from sorl_trl import SOGRPOConfig
from sorl_trl.trainers.checks.options import IDLE, SET_BY_ROLLOUT
from tests.integration import (
    test_batch_options,
    test_generation_options,
    test_idle_options,
    test_options,
    test_refused_options,
    test_training_noise,
    test_vllm_options,
)
from tests.named_tests import what_it_tries

TEXT = (Path(__file__).parents[2] / "docs/options.md").read_text()
TESTS = (
    test_options,
    test_generation_options,
    test_vllm_options,
    test_batch_options,
    test_refused_options,
    test_idle_options,
    test_training_noise,
)


def names_of(config_class: Any) -> set[str]:
    return {each.name for each in dataclasses.fields(config_class)}


def rows(columns: int) -> list[list[str]]:
    """The cells of the rows of every table of so many columns, less its heading."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("| `")
    ]
    return [row for row in cells if len(row) == columns]


OPTIONS = {row[0].strip("`"): row for row in rows(5)}
"""Option -> its row."""
IDLE_OPTIONS = {name for row in IDLE for name in row.options}
OWN = names_of(GRPOConfig) - names_of(TrainingArguments)


def test_every_option_has_one_row() -> None:
    assert set(OPTIONS) == OWN
    assert len(rows(5)) == len(OPTIONS)


@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_its_test_is_about_it(option: str) -> None:
    test = OPTIONS[option][4].strip("`")
    found = [module for module in TESTS if hasattr(module, test)]
    assert len(found) == 1, f"{test} is in {found}"
    assert re.search(rf"\b{option}\b", what_it_tries(getattr(found[0], test))), f"{test} does not name {option}"


@pytest.mark.parametrize("option", sorted(OPTIONS))
def test_what_it_says_is_what_the_checks_do(option: str) -> None:
    _, with_rollout, native, remarks, _ = OPTIONS[option]
    refused = option in test_refused_options.REFUSED or option == "use_transformers_paged"
    assert refused == ("refused" in with_rollout)
    assert not native.startswith("refused")
    said = "no effect" in (with_rollout + native + remarks).lower() or "## vLLM" in section_of(option)
    text_alone = option == "log_multimodal"  # prompts without images have none to log
    passed_on = option in ("model_init_kwargs",)  # TRL warns
    assert said == (option in IDLE_OPTIONS | {"max_tool_calling_iterations"} or text_alone or passed_on), option
    for cell in (with_rollout, native):
        assert re.match(r"honoured|refused|no effect", cell), cell


def section_of(option: str) -> str:
    """The heading under which the option stands, for those that stand under vLLM's and are read with it alone."""
    before = TEXT[: TEXT.index(f"| `{option}` |")]
    heading = before[before.rindex("\n## ") :]
    return heading if option not in ("use_vllm", "vllm_importance_sampling_cap") else ""


def test_defaults_that_are_not_trls() -> None:
    ours = {each.name: each.default for each in dataclasses.fields(SOGRPOConfig)}
    trls = {each.name: each.default for each in dataclasses.fields(GRPOConfig)}
    changed = {name for name in OWN if ours[name] != trls[name]}
    said = {option for option, row in OPTIONS.items() if "default" in row[1]}
    assert said == changed
    for option in changed:
        assert f"honoured, default `{ours[option]!r}`" == OPTIONS[option][1] == OPTIONS[option][2]


def test_keys_of_generation_kwargs() -> None:
    table = {
        row[0]: row[1] for row in (line.strip("| ").split(" | ") for line in TEXT.splitlines() if "`max_" in line)
    }
    for engine, label in (("transformers", "transformers"), ("vllm", "vLLM")):
        assert set(re.findall(r"`(\w+)`", table[label])) == set(SET_BY_ROLLOUT[engine])


def test_arguments_of_the_trainer() -> None:
    named = {row[0].strip("`") for row in rows(4)}
    assert named == set(inspect.signature(GRPOTrainer.__init__).parameters) - {"self"}


def test_arguments_of_transformers() -> None:
    of_transformers = {row[0].strip("`"): row for row in rows(3) if row[1] in ("honoured", "refused", "no effect")}
    assert set(of_transformers) <= names_of(TrainingArguments)
    idle = {option for option, row in of_transformers.items() if row[1] == "no effect"}
    for option in idle:
        others = set(re.findall(r"`(\w+)`", of_transformers[option][2])) & names_of(TrainingArguments)
        idle = idle | (others - {"seed"})
    assert idle == IDLE_OPTIONS & names_of(TrainingArguments)
