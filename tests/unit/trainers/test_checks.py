"""What is said of a method's name before a run."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sorl_trl import SOGRPOConfig, SOPPOConfig
from sorl_trl.methods import METHODS, SETTINGS, EngineVeto, LeaveOneOut, Method, TurnRatio, ZeroVariance
from sorl_trl.trainers.checks import check_method, check_precision, check_processor, check_reward_names


def config(folder: Path, config_class: Any = SOGRPOConfig, **fields: Any) -> Any:
    return config_class(str(folder), use_cpu=True, bf16=False, **fields)


def warnings_of(caplog: pytest.LogCaptureFixture, name: str, args: Any) -> list[str]:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        check_method(METHODS[name], args, by_name=True)
    return [record.getMessage() for record in caplog.records]


class TestSettings:
    def test_only_what_was_left_at_its_default_is_named(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        chosen = {"epsilon": 0.3, "loss_type": "grpo"}
        (line,) = warnings_of(caplog, "sequence", config(tmp_path, **chosen))
        assert "`importance_sampling_level`" in line
        assert "`epsilon`" not in line
        assert "`loss_type`" not in line

    @pytest.mark.parametrize("name", SETTINGS)
    def test_its_settings_say_nothing(self, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
        config_class = SOPPOConfig if "ppo" in name or "advantage_level" in SETTINGS[name] else SOGRPOConfig
        assert not warnings_of(caplog, name, config(tmp_path, config_class, num_generations=2, **SETTINGS[name]))

    def test_a_method_of_the_other_trainer(self, tmp_path: Path) -> None:
        with pytest.raises(
            ValueError, match="`method` is 'ppo', whose settings have `advantage_level`, but SOGRPOConfig"
        ):
            check_method(METHODS["ppo"], config(tmp_path), by_name=True)


@pytest.mark.parametrize(
    ("fields", "warns"),
    [
        (SETTINGS["sequence"], True),
        (SETTINGS["gspo"], True),
        ({"clip_range_scaling": "length"}, True),
        ({"clip_range_scaling": "sqrt_length"}, False),
        ({"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 0.2}, False),
        ({"epsilon_high": 1e-3}, True),
        (SETTINGS["sequence"] | {"num_iterations": 1}, False),
        (SETTINGS["grpo"] | {"epsilon": 1e-3}, False),
    ],
    ids=str,
)
def test_a_range_that_bfloat16_cannot_resolve(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fields: dict[str, Any], warns: bool
) -> None:
    for dtype, is_warned in ((torch.bfloat16, warns), (torch.float32, False)):
        caplog.clear()
        args = config(tmp_path, **{"num_iterations": 2, **fields})
        check_precision(SimpleNamespace(args=args, model=SimpleNamespace(dtype=dtype)))
        assert any("bfloat16" in record.getMessage() for record in caplog.records) == is_warned


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (Method(credit=LeaveOneOut()), "`scale_rewards` is 'group', but must be 'none'"),
        (Method(keep=(EngineVeto(),)), "EngineVeto.*these are the same"),
        (Method(weight=TurnRatio(high=2.0)), "TurnRatio.*these are the same"),
    ],
    ids=str,
)
def test_pieces_that_do_not_fit_are_refused(tmp_path: Path, method: Method, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_method(method, config(tmp_path))
    ahead = {"async_staleness": 1, "async_old_policy": "proximal"}
    check_method(method, config(tmp_path, scale_rewards="none", **ahead))


def test_a_filter_names_a_reward_function() -> None:
    check_reward_names(Method(keep=(ZeroVariance("right"),)), ["right", "short"])
    with pytest.raises(ValueError, match=r"`reward` 'wrong', but must name .*\['right', 'short'\]"):
        check_reward_names(Method(keep=(ZeroVariance("wrong"),)), ["right", "short"])


def test_groups_of_one_have_nothing_to_choose_from(tmp_path: Path) -> None:
    """Each filter would drop them all, and the policy would learn nothing."""
    args = config(tmp_path, SOPPOConfig)
    for name in ("dapo", "starpo_s", "ragen2"):
        with pytest.raises(ValueError, match="`num_generations` is 1, but must be at least 2"):
            check_method(METHODS[name], args)
    check_method(METHODS["void"], args)


@pytest.mark.parametrize(
    ("processor", "bf16", "warnings"), [("AVX2", True, 1), ("AVX2", False, 0), ("AVX512", True, 0)]
)
def test_bfloat16_without_instructions_is_said(
    processor: str,
    bf16: bool,
    warnings: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: processor)
    args = config(tmp_path)
    args.bf16 = bf16
    check_processor(args)
    assert len(caplog.records) == warnings
