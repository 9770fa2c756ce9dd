"""How a trainer shows that it is called: as TRL's is."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from trl import GRPOTrainer

from sorl_trl import SOGRPOTrainer, SOPPOTrainer


@pytest.mark.parametrize("trainer_class", [SOGRPOTrainer, SOPPOTrainer])
def test_a_trainer_shows_trls_arguments(trainer_class: Any) -> None:
    """`help()` and editors ask `inspect.signature`."""
    assert inspect.signature(trainer_class) == inspect.signature(GRPOTrainer)


def test_a_subclass_shows_its_own() -> None:
    class WithAFlag(SOGRPOTrainer):
        def __init__(self, flag: bool, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    assert [*inspect.signature(WithAFlag).parameters] == ["flag", "args", "kwargs"]
