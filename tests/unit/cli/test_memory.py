"""What a run takes of each device's memory, by hand, and what is turned first where that is too much."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import memory_table
from benchmarks.common import RESULTS
from transformers import LlamaConfig, LlamaForCausalLM

from sorl_trl.cli.dry_run import estimate

SHAPE = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 1}
LONGEST = 1024
LAYER = 4 * LONGEST * (6 * 64 * 4 + (6 * 64 + 4 * 256) * 4)
KEPT = 2 * 4 * LONGEST * 64 * 4
TILE = 4096 * 32768 * 4
CACHE = 16 * LONGEST * 2 * 32 * 4


@pytest.fixture(scope="module")
def model() -> Any:
    config = LlamaConfig(**SHAPE, num_hidden_layers=2, vocab_size=1000, tie_word_embeddings=True)
    with torch.device("meta"):
        return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def weights(model: Any) -> int:
    return 4 * sum(parameter.numel() for parameter in model.parameters())


def config(**changed: Any) -> Any:
    told = {
        **{"device": SimpleNamespace(type="cuda"), "world_size": 1, "deepspeed_plugin": None, "beta": 0.0},
        **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "gradient_checkpointing": True},
        **{"generation_batch_size": 16, "optim": "adamw_torch", "bf16": False, "fp16": False},
        **{"use_vllm": False, "vllm_mode": "colocate", "vllm_enable_sleep_mode": False},
        "async_staleness": 0,
        "vllm_gpu_memory_utilization": 0.5,
    }
    return SimpleNamespace(**{**told, **changed})


def zero(stage: int) -> dict[str, Any]:
    plugin = SimpleNamespace(zero_stage=stage)
    return {"world_size": 4, "generation_batch_size": 64, "deepspeed_plugin": plugin}


def test_a_step_by_hand(model: Any, weights: int) -> None:
    head = 4 * 1000 * 64
    found = estimate(model, config(), LONGEST, 2**30)
    assert found.rows == {
        "weights": weights,
        "gradients": weights,
        "optimizer": 2 * weights,
        "activations": KEPT + LAYER,
        "logits": TILE + head,
        "keys and values": CACHE,
    }
    assert found.training == 3 * weights + KEPT + TILE + head, "the gradients are not there with the tile"
    assert found.generating == 3 * weights + CACHE
    assert found.peak == found.training
    assert estimate(model, config(gradient_accumulation_steps=2), LONGEST, 2**30).training == found.training + weights
    assert estimate(model, config(beta=0.1), LONGEST, 2**30).training == found.training + weights


def test_a_copy_for_each_rollout_that_is_under_way(model: Any, weights: int) -> None:
    plain, ahead = (estimate(model, config(async_staleness=count), LONGEST, 2**30) for count in (0, 2))
    assert ahead.rows["copies for async rollouts"] == 3 * weights
    assert (ahead.training - plain.training, ahead.generating - plain.generating) == (3 * weights, 3 * weights)
    assert (
        "copies for async rollouts"
        not in estimate(model, config(async_staleness=2, use_vllm=True), LONGEST, 2**30).rows
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_sharded(model: Any, weights: int, stage: int) -> None:
    rows = estimate(model, config(**zero(stage)), LONGEST, 2**30).rows
    assert rows["optimizer"] == 2 * weights / (4 if stage >= 1 else 1)
    assert rows["gradients"] == weights / (4 if stage >= 2 else 1)
    assert rows["weights"] == weights / (4 if stage >= 3 else 1)
    assert rows.get("weights gathered to generate", 0) == (weights * 3 / 4 if stage == 3 else 0)


def test_half_precision_keeps_copies_of_the_weights(model: Any, weights: int) -> None:
    by_autocast = estimate(model, config(bf16=True), LONGEST, 2**30).rows
    assert (by_autocast["weights"], by_autocast["optimizer"]) == (weights, 2 * weights)
    assert by_autocast["activations"] > weights / 2 + KEPT
    by_deepspeed = estimate(model, config(**zero(0), bf16=True), LONGEST, 2**30).rows
    assert (by_deepspeed["weights"], by_deepspeed["optimizer"]) == (weights / 2, 3 * weights)


def test_a_vllm_that_sleeps_leaves_its_memory_to_training(model: Any, weights: int) -> None:
    awake = estimate(model, config(use_vllm=True), LONGEST, 2**30)
    asleep = estimate(model, config(use_vllm=True, vllm_enable_sleep_mode=True), LONGEST, 2**30)
    assert awake.training - asleep.training == 2**29
    assert awake.generating == asleep.generating == 3 * weights + 2**29


@pytest.mark.parametrize("lora", [False, True])
def test_the_table_of_gpus_has_these_estimates(lora: bool) -> None:
    table = (RESULTS / "memory_table.md").read_text()
    assert " | ".join(memory_table.row("Qwen3-1.7B", "16k", lora)) in table, "run `python -m benchmarks.memory_table`"
