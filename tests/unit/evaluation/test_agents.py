from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from peft import LoraConfig

from sorl_trl.evaluation.agents import load_tokenizer, message_ends
from sorl_trl.rollout import RolloutArguments


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


def test_an_adapter_without_a_tokenizer_has_its_base_models(tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "base/config.json").write_text('{"model_type": "llama"}')
    LoraConfig(base_model_name_or_path=str(tmp_path / "base")).save_pretrained(tmp_path / "adapter")
    asked: Any = (str(tmp_path / "adapter"), "main", False, RolloutArguments())
    assert load_tokenizer(*asked).get_vocab() == tokenizer.get_vocab()
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(tmp_path / "adapter")
    assert load_tokenizer(*asked).get_vocab() == tokenizer.get_vocab()
