"""A warning points at the user's line, whatever of ours stands between it and TRL."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sorl_trl import SOGRPOConfig, SOGRPOTrainer, SOPPOConfig, SOPPOTrainer
from sorl_trl.caller_warnings import warnings_at_the_caller
from tests.policies import build_policy
from tests.training import settings
from tests.trajectories import FixedRollout, parity_reward, prompts


@dataclass
class Derived(SOGRPOConfig):
    """A config of the user's own."""


@pytest.mark.parametrize("config_class", [SOGRPOConfig, SOPPOConfig, Derived])
@pytest.mark.parametrize("old", [{"vllm_importance_sampling_cap": 2.0}, {"use_transformers_paged": True}])
def test_of_a_config(tmp_path: Path, config_class: Any, old: dict[str, Any]) -> None:
    with pytest.warns(FutureWarning, match="deprecated") as caught:
        config_class(**settings(tmp_path, **old))
    assert [one.filename for one in caught if next(iter(old)) in str(one.message)] == [__file__]


@pytest.mark.parametrize(
    ("trainer_class", "config_class"), [(SOGRPOTrainer, SOGRPOConfig), (SOPPOTrainer, SOPPOConfig)]
)
def test_of_a_trainer(tmp_path: Path, tokenizer: Any, monkeypatch: Any, trainer_class: Any, config_class: Any) -> None:
    monkeypatch.delenv("TRL_EXPERIMENTAL_SILENCE", raising=False)
    config = trainer_class.config_class(**settings(tmp_path))

    def make() -> None:
        arguments = {"processing_class": tokenizer, "rollout_func": FixedRollout()}
        trainer_class(build_policy(), parity_reward, config, prompts(), **arguments)

    with pytest.warns(UserWarning, match="You are using 'rollout_func'") as caught:
        make()
    (warning,) = [one for one in caught if "rollout_func" in str(one.message)]
    assert (warning.filename, warning.lineno) == (__file__, make.__code__.co_firstlineno + 2)
    with warnings.catch_warnings():  # filters go by the user's module, and one that raises raises there
        warnings.filterwarnings("error", module=__name__)
        with pytest.raises(UserWarning, match="rollout_func"):
            make()


OURS = """
import warnings
from sorl_trl.caller_warnings import warnings_at_the_caller

def call(function, **options):
    with warnings_at_the_caller():
        return inner(function, **options)

def inner(function, **options):
    return function(**options)
"""


def ours() -> dict[str, Any]:
    """A module of this package."""
    module: dict[str, Any] = {"__name__": "sorl_trl.trainers.made_up"}
    exec(compile(OURS, "made_up.py", "exec"), module)
    return module


def warn(**options: Any) -> None:
    warnings.warn("old", **options)


def test_other_warnings_are_left_where_they_are() -> None:
    call = ours()["call"]
    with pytest.warns(DeprecationWarning) as caught:
        call(warn, category=DeprecationWarning)
        call(warn, category=DeprecationWarning, stacklevel=1)
        call(warn, category=DeprecationWarning, stacklevel=1000)
    here = [one.lineno for one in caught if one.filename == __file__]
    assert here == [warn.__code__.co_firstlineno + 1] * 2


def test_the_level_counts_from_the_first_line_that_is_not_ours() -> None:
    call = ours()["call"]
    for stacklevel in (2, 3):
        with pytest.warns(UserWarning) as caught:
            call(warn, stacklevel=stacklevel)
        assert caught[0].filename == __file__
        assert caught[0].lineno != warn.__code__.co_firstlineno + 1


def test_warn_is_restored_after_an_error() -> None:
    before = warnings.warn
    with pytest.raises(KeyError), warnings_at_the_caller():
        assert warnings.warn is not before
        raise KeyError
    assert warnings.warn is before
