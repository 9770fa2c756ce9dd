"""What is said of a method's name before a run, and the noise that is switched off."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import nn

from sorl_trl import SOGRPOConfig, SOPPOConfig
from sorl_trl.methods import METHODS, SETTINGS, EngineVeto, LeaveOneOut, Method, TurnRatio, ZeroVariance
from sorl_trl.trainers.checks import (
    check_method,
    check_precision,
    check_processor,
    check_reward_names,
    disable_noise,
)
from tests.model_families import BLOOM, GQA

OPT: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
}
FALCON: dict[str, Any] = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def adapted(adapter: Any) -> Any:
    return get_peft_model(hf.LlamaForCausalLM(hf.LlamaConfig(**GQA)), adapter)


def with_norm(norm: nn.Module) -> Any:
    policy = hf.LlamaForCausalLM(hf.LlamaConfig(**GQA))
    policy.model.norm = norm
    return policy


TO = {"target_modules": ["q_proj", "v_proj"]}
NOISY: dict[str, Callable[[], Any]] = {
    "attention": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GQA, attention_dropout=0.5)),
    "numbers": lambda: hf.BloomForCausalLM(hf.BloomConfig(**BLOOM, hidden_dropout=0.5)),
    "config": lambda: hf.FalconForCausalLM(hf.FalconConfig(**FALCON, hidden_dropout=0.5)),
    "layers": lambda: hf.OPTForCausalLM(hf.OPTConfig(**OPT, num_attention_heads=4, dropout=0.0, layerdrop=0.5)),
    "routers": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**GQA, num_local_experts=4, router_jitter_noise=0.5)),
    "lora": lambda: adapted(LoraConfig(**TO, lora_dropout=0.5, init_lora_weights=False)),
    "other layers": lambda: with_norm(nn.AlphaDropout(0.5)),
}
"""Policies that draw at random in training mode, by what is drawn or where its strength is held."""


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


@pytest.mark.parametrize("kind", NOISY)
def test_noise_of_training_mode_is_switched_off(kind: str) -> None:
    torch.manual_seed(0)
    policy = NOISY[kind]().train()
    ids = torch.arange(4, 24).view(2, 10)

    def differ() -> bool:
        with torch.no_grad():
            return any(not torch.equal(*(policy(input_ids=ids).logits for _ in range(2))) for _ in range(4))

    assert differ()
    disable_noise(policy)
    assert not differ()
