"""The README's examples, as they stand, on small files in the same schema; and its length."""

from __future__ import annotations

from pathlib import Path

import pytest

from sorl_trl.methods import PPOMin
from sorl_trl.qa import exact_match_reward
from tests.documentation import ROOT, run_blocks, set_stage

README = ROOT / "README.md"


def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_stage(monkeypatch, tmp_path)
    given = {"model": "policy", "reward": exact_match_reward, "my_surrogate": PPOMin()}
    names = run_blocks(README, **given)
    assert names["trainer"].state.global_step == 1
    assert names["critic"].head.weight.shape == (1, 16)
