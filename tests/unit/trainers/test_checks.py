"""What is said of a method's name before a run, and the noise that is switched off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model

from sorl_trl import SOGRPOConfig, SOPPOConfig
from sorl_trl.methods import METHODS, SETTINGS, EngineVeto, LeaveOneOut, Method, TurnRatio, ZeroVariance
from sorl_trl.trainers.checks import check_method, check_reward_names, disable_noise
from tests.model_families import GQA

FALCON: dict[str, Any] = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def adapted(adapter: Any) -> Any:
    return get_peft_model(hf.LlamaForCausalLM(hf.LlamaConfig(**GQA)), adapter)


TO = {"target_modules": ["q_proj", "v_proj"]}
NOISY: dict[str, Callable[[], Any]] = {
    "attention": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GQA, attention_dropout=0.5)),
    "config": lambda: hf.FalconForCausalLM(hf.FalconConfig(**FALCON, hidden_dropout=0.5)),
    "routers": lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**GQA, num_local_experts=4, router_jitter_noise=0.5)),
    "lora": lambda: adapted(LoraConfig(**TO, lora_dropout=0.5, init_lora_weights=False)),
}
"""Policies that draw at random in training mode, by what is drawn or where its strength is held."""


def config(folder: Path, config_class: Any = SOGRPOConfig, **fields: Any) -> Any:
    return config_class(str(folder), use_cpu=True, bf16=False, **fields)


def test_a_name_without_its_settings_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, fields in SETTINGS.items():
        config_class = SOPPOConfig if "ppo" in name or "advantage_level" in fields else SOGRPOConfig
        check_method(METHODS[name], config(tmp_path, config_class, num_generations=2, **fields), by_name=True)
    assert not caplog.records
    check_method(METHODS["sequence"], config(tmp_path, epsilon=0.3), by_name=True)
    assert "`importance_sampling_level`" in caplog.text and "`epsilon`" not in caplog.text


@pytest.mark.parametrize(
    ("method", "named", "fields"),
    [
        (METHODS["ppo"], "`advantage_level`", {}),
        (Method(credit=LeaveOneOut()), "`scale_rewards`", {}),
        (Method(keep=(EngineVeto(),)), "EngineVeto", {}),
        (Method(weight=TurnRatio(high=2.0)), "TurnRatio", {}),
        (METHODS["dapo"], "`num_generations`", {"config_class": SOPPOConfig}),
    ],
    ids=str,
)
def test_a_method_that_does_not_fit_is_refused(
    tmp_path: Path, method: Method, named: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=named):
        check_method(method, config(tmp_path, **fields), by_name=True)


def test_methods_that_fit(tmp_path: Path) -> None:
    ahead = config(tmp_path, scale_rewards="none", async_staleness=1, async_old_policy="proximal")
    for method in (Method(credit=LeaveOneOut()), Method(keep=(EngineVeto(),)), Method(weight=TurnRatio(high=2.0))):
        check_method(method, ahead)
    check_method(METHODS["void"], config(tmp_path, SOPPOConfig))


def test_a_filter_names_a_reward_function() -> None:
    check_reward_names(Method(keep=(ZeroVariance("right"),)), ["right", "short"])
    with pytest.raises(ValueError, match="`reward` 'wrong'"):
        check_reward_names(Method(keep=(ZeroVariance("wrong"),)), ["right", "short"])


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
