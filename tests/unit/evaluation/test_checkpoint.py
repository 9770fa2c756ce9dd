from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sorl_trl.evaluation.checkpoint import files_hash, message_ends


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


def test_the_hash_of_a_folder_changes_with_its_files(tmp_path: Path) -> None:
    assert files_hash("Qwen/Qwen2.5-7B") is None
    (tmp_path / "model.safetensors").write_bytes(b"1")
    first = files_hash(str(tmp_path))
    assert first == files_hash(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"22")
    second = files_hash(str(tmp_path))
    (tmp_path / "adapter_config.json").touch()
    assert len({first, second, files_hash(str(tmp_path))}) == 3
