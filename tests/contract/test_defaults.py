"""The tables of defaults that differ from TRL's are complete: with TRL's values, the trainer is TRL's."""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig, GRPOTrainer

from sorl_trl import SOGRPOConfig, SOGRPOTrainer, SOPPOConfig
from tests.documentation import ROOT
from tests.training import assert_same, settings, train

PAGES = [ROOT / "README.md", ROOT / "docs" / "options.md"]
OF_OURS_ALONE = {"target_kl": 0.0, "method": "grpo"}
"""What TRL has no name for, and the value without which it does nothing."""


def defaults(config_class: Any) -> dict[str, Any]:
    def default(field: Field[Any]) -> Any:
        return field.default if field.default_factory is MISSING else field.default_factory()

    return {field.name: default(field) for field in fields(config_class)}


def differing(config_class: Any) -> dict[str, tuple[Any, Any]]:
    """Fields of TRL's whose default is another here: TRL's, and ours."""
    ours = defaults(config_class)
    return {name: (theirs, ours[name]) for name, theirs in defaults(GRPOConfig).items() if theirs != ours[name]}


def table(page: Path) -> dict[str, tuple[str, str]]:
    """Field to what the columns "TRL" and "here" of a page's table say."""
    rows = page.read_text().partition("| TRL | here |")[2].partition("\n\n")[0]
    found = re.findall(r"^\| `(\w+)`[^|]* \| ([^|]+) \| ([^|]+?) \|", rows, re.MULTILINE)
    return {name: (theirs.strip("`"), ours.strip("`")) for name, theirs, ours in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_default_that_differs_is_in_the_table(page: Path) -> None:
    said = table(page)
    assert {*said} == {*differing(SOGRPOConfig), *OF_OURS_ALONE}
    for name, (theirs, ours) in differing(SOGRPOConfig).items():
        assert said[name][0] == str(theirs)
        assert re.split(r"\W*[,:]", said[name][1])[0] == str(ours), name
    assert defaults(SOGRPOConfig)["target_kl"] == float(said["target_kl"][1].partition(":")[0])
    assert SOGRPOTrainer.default_method in said["method"][1]


def test_those_of_the_critic_are_named() -> None:
    (said,) = re.findall(
        r"^Three more defaults.*?\n\n", (ROOT / "docs/options.md").read_text(), re.DOTALL | re.MULTILINE
    )
    more = {name: ours for name, (_, ours) in differing(SOPPOConfig).items() if name not in differing(SOGRPOConfig)}
    assert len(more) == 3
    for name, value in more.items():
        assert re.search(rf"`{name}` (is|must be) `?{value}", said), name


@pytest.mark.trains
def test_with_trls_values_it_is_trl(tmp_path: Path, tokenizer: Any) -> None:
    """Each default that differs, set to TRL's: nothing else does."""
    given = {name: value for name, value in settings(tmp_path).items() if name not in differing(SOGRPOConfig)}
    undone = {name: theirs for name, (theirs, _) in differing(SOGRPOConfig).items()} | OF_OURS_ALONE
    theirs = train(GRPOTrainer, GRPOConfig, tokenizer, **given)
    ours = train(SOGRPOTrainer, SOGRPOConfig, tokenizer, **given, **undone)
    assert_same(ours, theirs)
    assert max(log.get("clip_ratio/region_mean", 0.0) for log in ours.state.log_history) > 0
