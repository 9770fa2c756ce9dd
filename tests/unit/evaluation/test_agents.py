from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import LoraConfig

from sorl_trl.evaluation.agents import load_tokenizer
from sorl_trl.rollout import RolloutArguments


def test_an_adapter_without_a_tokenizer_has_its_base_models(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "base/config.json").write_text('{"model_type": "llama"}')
    LoraConfig(base_model_name_or_path=str(tmp_path / "base")).save_pretrained(tmp_path / "adapter")
    asked: Any = (str(tmp_path / "adapter"), "main", False, RolloutArguments())
    assert load_tokenizer(*asked).get_vocab() == tokenizer.get_vocab()
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(tmp_path / "adapter")
    assert load_tokenizer(*asked).get_vocab() == tokenizer.get_vocab()
