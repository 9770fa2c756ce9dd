"""The tables of defaults that differ from TRL's are complete: with TRL's values, the trainer is TRL's."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig, GRPOTrainer

from sorl_trl import SOGRPOConfig, SOGRPOTrainer
from tests.training import assert_same, settings, train

OURS_ALONE = {"target_kl": 0.0, "method": "grpo"}
"""What TRL has no name for, and the value without which it does nothing."""


def defaults(config_class: Any) -> dict[str, Any]:
    def default(field: Field[Any]) -> Any:
        return field.default if field.default_factory is MISSING else field.default_factory()

    return {field.name: default(field) for field in fields(config_class)}


def differing(config_class: Any) -> dict[str, tuple[Any, Any]]:
    """Fields of TRL's whose default is another here: TRL's, and ours."""
    ours = defaults(config_class)
    return {name: (theirs, ours[name]) for name, theirs in defaults(GRPOConfig).items() if theirs != ours[name]}


@pytest.mark.trains
def test_with_trls_values_it_is_trl(tmp_path: Path, tokenizer: Any) -> None:
    """Each default that differs, set to TRL's: nothing else does."""
    given = {name: value for name, value in settings(tmp_path).items() if name not in differing(SOGRPOConfig)}
    undone = {name: theirs for name, (theirs, _) in differing(SOGRPOConfig).items()} | OURS_ALONE
    theirs = train(GRPOTrainer, GRPOConfig, tokenizer, **given)
    ours = train(SOGRPOTrainer, SOGRPOConfig, tokenizer, **given, **undone)
    assert_same(ours, theirs)
    assert max(log.get("clip_ratio/region_mean", 0.0) for log in ours.state.log_history) > 0
