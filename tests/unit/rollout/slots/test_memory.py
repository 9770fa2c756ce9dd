"""How much memory slots take by default."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from sorl_trl.rollout.slots.memory import _left_to_container, free_bytes


def test_a_container_has_what_its_limit_leaves(tmp_path: Path) -> None:
    assert _left_to_container(tmp_path) == math.inf
    (tmp_path / "memory.stat").write_text("anon 650\ninactive_file 40\nactive_file 10\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert _left_to_container(tmp_path) == math.inf
    (tmp_path / "memory.max").write_text("1000\n")
    assert _left_to_container(tmp_path) == 350, "what files were read is given up when it is needed"
    (tmp_path / "memory.max").write_text("600\n")
    assert _left_to_container(tmp_path) == 0


def test_processes_of_one_machine_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sorl_trl.rollout.slots.memory._available_ram", lambda: 8000)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert free_bytes(torch.device("cpu")) == 4000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_bytes(torch.device("cpu")) == 1000
