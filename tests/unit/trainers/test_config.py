"""Before a run: values and options that are refused, methods that do not fit, and the noise that is switched off."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model

from sorl_trl import SOGRPOConfig, SOPPOConfig
from sorl_trl.methods import METHODS, Method, constant_mean, method_from
from sorl_trl.trainers.checks import disable_noise
from tests.model_families import GQA

AHEAD = {"async_staleness": 1, "use_vllm": True, "vllm_mode": "server"}
TOLD = {"generation_kwargs": {"temperature": 0.7, "seed": 5}}
SUMS, EACH = ({"multi_objective_aggregation": each} for each in ("sum_then_normalize", "normalize_then_sum"))


def build(tmp_path: Path, config_class: Any = SOGRPOConfig, **given: Any) -> Any:
    return config_class(str(tmp_path), use_cpu=True, bf16=False, **given)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("importance_sampling_level", "word", "'turn'"),
        ("loss_type", "minirl", "'turn'"),
        ("bias_norm", "false", "one of True, False"),
        ("target_kl", -0.1, "at least 0"),
        ("gamma", 1.5, "[0, 1]"),
        ("async_staleness", 1.5, "a whole number"),
        ("epsilon", "0.1", "at least 0"),
        ("epsilon", float("nan"), "at least 0"),
        ("temperature", 0, "above 0"),
        ("top_p", 1.1, "[0, 1]"),
        ("learning_rate", "1e-6", "at least 0"),
        ("num_generations", 0, "at least 1"),  # TRL divides by it
    ],
)
def test_bad_values_are_named(tmp_path: Path, name: str, value: Any, allowed: str) -> None:
    with pytest.raises(ValueError) as error:
        build(tmp_path, **{name: value})
    assert all(each in str(error.value) for each in (f"`{name}` is {value!r}", allowed))


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("method", "pass it to the trainer"),
        ("tools", "pass it to the trainer"),
        ("learning_rat", "did you mean learning_rate?"),
        ("value_pool", "removed; the critic is read before the first token"),
        ("xyz", "`xyz` is not a field of SOPPOConfig"),
    ],
)
def test_what_is_no_field_is_named_with_its_place(tmp_path: Path, name: str, advice: str) -> None:
    with pytest.raises(TypeError, match=re.escape(advice)):
        build(tmp_path, SOPPOConfig, **{name: 1.0})


def test_a_config_of_the_users_own_may_take_more(tmp_path: Path) -> None:
    class Own(SOGRPOConfig):
        def __init__(self, mine: int, **given: Any) -> None:
            self.mine = mine
            super().__init__(**given)

    assert copy.deepcopy(Own(mine=3, output_dir=str(tmp_path), use_cpu=True, bf16=False)).mine == 3


@pytest.mark.parametrize(
    ("config_class", "given", "named", "instead"),
    [
        (SOPPOConfig, EACH, "multi_objective_aggregation", SUMS),
        (SOPPOConfig, {"per_device_train_batch_size": 1}, "per_device_train_batch_size", {"steps_per_generation": 2}),
        (SOGRPOConfig, {**AHEAD, "top_p": 0.8}, "top_p", {"top_p": 1.0}),
        (SOPPOConfig, {**AHEAD, "top_k": 5}, "top_k", {"top_k": -1}),
        (SOGRPOConfig, {**AHEAD, "repetition_penalty": 1.1}, "repetition_penalty", {"repetition_penalty": 1.0}),
        (SOGRPOConfig, {**AHEAD, **TOLD, "temperature": 0.5}, "temperature", {"temperature": 0.7}),
        (SOGRPOConfig, {**AHEAD, "vllm_structured_outputs_regex": "a+"}, "structured_outputs", {"async_staleness": 0}),
    ],
)
def test_options_that_do_not_go_together(
    tmp_path: Path, config_class: Any, given: dict[str, Any], named: str, instead: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=f"`{named}"):
        build(tmp_path, config_class, **given)
    build(tmp_path, config_class, **{**given, **instead})


# ---------------------------------------------------------------------------------------------------------------------
# Methods, and noise
# ---------------------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", METHODS)
def test_a_named_method_needs_nothing_of_the_config(tmp_path: Path, name: str) -> None:
    has_critic = "ppo" in name
    config = build(tmp_path, SOPPOConfig if has_critic else SOGRPOConfig)
    assert method_from(name, config) == METHODS[name]
    METHODS[name].check(config, has_critic)
    with pytest.raises(ValueError, match="`SOGRPOTrainer`" if has_critic is False else "`SOPPOTrainer`"):
        METHODS[name].check(config, not has_critic)


@pytest.mark.parametrize(("config_class", "name"), [(SOGRPOConfig, "so_grpo"), (SOPPOConfig, "so_ppo")])
def test_the_defaults_of_config_and_method_are_the_same(tmp_path: Path, config_class: Any, name: str) -> None:
    found = method_from({"terms": "clip_penalty"}, build(tmp_path, config_class))
    assert (found, found.name) == (METHODS[name], name)


@pytest.mark.parametrize(
    ("method", "field", "value", "advice"),
    [
        ("gspo", "epsilon", 0.1, "clip=Clip(low=0.1,"),
        ("gspo", "epsilon_high", 0.5, "clip=Clip(low=0.28, high=0.5"),
        ("gigpo", "gamma", 0.9, "{name: gigpo, gamma: …}"),
        ("loop", "scale_rewards", "batch", "credit=GroupMean(scale='batch'"),
        ("dapo", "loss_type", "grpo", "{name: dapo, mean: …}"),
        ("grpo", "turn_ratio", "arithmetic", "ratio=Ratio(level='turn', average='arithmetic')"),
        (Method(), "target_kl", 0.1, "`method: {target_kl: …}`"),
        ({"clip": {"low": 0.1}}, "scale_clip_range", False, "by_length=False"),
        ({"name": "gspo", "keep": "zero_variance"}, "bias_norm", True, "{name: gspo, bias_norm: …}"),
    ],
)
def test_a_field_that_the_method_decides_is_refused(
    tmp_path: Path, method: Any, field: str, value: Any, advice: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(f"`{field}` is {value!r}, but `method`")) as error:
        method_from(method, build(tmp_path, **{field: value}))
    assert advice in str(error.value)


def test_a_field_that_a_piece_leaves_open_or_says_itself_is_taken(tmp_path: Path) -> None:
    found = method_from({"surrogate": "sapo"}, build(tmp_path, loss_type="dr_grpo", gamma=0.9))
    assert (found.mean, found.gamma) == (constant_mean, 0.9)
    assert method_from("grpo", build(tmp_path, epsilon=0.2, target_kl=0.0)) == METHODS["grpo"]


@pytest.mark.parametrize(
    ("method", "named", "fields"),
    [
        ({"name": "dapo", "credit": "gae"}, "`num_generations`", {"config_class": SOPPOConfig}),
        ({"credit": "agent_wise"}, "`gamma`", {"gamma": 0.9}),
        ({}, "`bias_norm`", {"loss_type": "sapo", "bias_norm": True}),
    ],
    ids=str,
)
def test_a_method_that_does_not_fit_is_refused(
    tmp_path: Path, method: Any, named: str, fields: dict[str, Any]
) -> None:
    config = build(tmp_path, **fields)
    with pytest.raises(ValueError, match=named):
        method_from(method, config).check(config, "config_class" in fields)


def test_removed_settings_are_refused() -> None:
    with pytest.raises(ImportError, match='`method="loop"` is enough'):
        import_module("sorl_trl.methods").SETTINGS  # noqa: B018


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
