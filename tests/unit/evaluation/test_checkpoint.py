from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import GenerationConfig

from sorl_trl.cli.evaluation_run import generation_config
from sorl_trl.evaluation.checkpoint import ModelArguments, load_tokenizer, message_ends
from sorl_trl.records.evaluated import files_hash
from sorl_trl.rollout.slots.support import resolved


@pytest.mark.parametrize(
    ("configured", "ends"),
    [
        (SimpleNamespace(eos_token_id=None), [2]),
        (SimpleNamespace(eos_token_id=2), [2]),
        (SimpleNamespace(eos_token_id=7), [2, 7]),
        (SimpleNamespace(eos_token_id=[7, 0]), [0, 2, 7]),
        (None, [2]),
    ],
)
def test_a_message_ends_where_tokenizer_or_checkpoint_say_so(configured: Any, ends: list[int]) -> None:
    model: Any = SimpleNamespace(generation_config=configured)
    tokenizer: Any = SimpleNamespace(eos_token_id=2)
    assert message_ends(model, tokenizer) == ends


def test_a_copy_has_the_hash_of_the_original_and_trained_weights_have_another(tmp_path: Path) -> None:
    policy, weights = tmp_path / "policy", torch.zeros(2**21)
    policy.mkdir()
    save_file({"embedding": weights}, policy / "model.safetensors")
    before = files_hash(str(policy))
    shutil.copytree(policy, tmp_path / "copy", copy_function=shutil.copyfile)  # whose times are of now
    assert files_hash(str(tmp_path / "copy")) == before
    save_file({"embedding": weights + 1e-6}, policy / "model.safetensors")
    assert files_hash(str(policy)) != before


def test_the_hash_of_a_folder_changes_with_its_files(tmp_path: Path) -> None:
    assert files_hash("Qwen/Qwen2.5-7B") is None
    (tmp_path / "model.safetensors").write_bytes(b"1")
    first = files_hash(str(tmp_path))
    assert first == files_hash(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"22")
    second = files_hash(str(tmp_path))
    (tmp_path / "adapter_config.json").touch()
    third = files_hash(str(tmp_path))
    assert len({first, second, third}) == 3
    (tmp_path / "notes.txt").mkdir()  # nor is a folder
    for name in ("trajectories.html", "metrics.json"):  # what is beside a policy is no part of it
        (tmp_path / name).touch()
    assert files_hash(str(tmp_path)) == third


def test_an_adapter_without_a_tokenizer_has_its_base_models(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "base/config.json").write_text('{"model_type": "llama"}')
    LoraConfig(base_model_name_or_path=str(tmp_path / "base")).save_pretrained(tmp_path / "adapter")
    arguments = ModelArguments(str(tmp_path / "adapter"))
    assert load_tokenizer(arguments).get_vocab() == tokenizer.get_vocab()
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(tmp_path / "adapter")
    assert load_tokenizer(arguments).get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_transformers_finds_nothing_wrong_with_how_a_checkpoint_is_asked(temperature: float) -> None:
    """Whatever its own config sets: greedy decoding has no use for it, as transformers would say."""
    own = GenerationConfig(do_sample=True, temperature=0.6, top_p=0.95, top_k=64)
    evaluation: Any = SimpleNamespace(temperature=temperature, top_p=0.9)
    asked = resolved(generation_config(evaluation), SimpleNamespace(generation_config=own))  # type: ignore[arg-type]
    asked.validate(strict=True)
    assert asked.do_sample == bool(temperature)
    assert not temperature or (asked.temperature, asked.top_p, asked.top_k, asked.min_p) == (0.7, 0.9, 0, 0.0)
