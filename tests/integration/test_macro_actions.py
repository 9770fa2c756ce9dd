"""Training with macro actions, between the two levels that they span: tokens and turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sorl_trl import SOPPOConfig, SOPPOTrainer
from tests.training import assert_same, settings, train

pytestmark = pytest.mark.trains


@pytest.mark.parametrize("ratio", ["token", "turn"])
@pytest.mark.parametrize(
    ("given", "tokens", "pool"), [("token", 1, "mean"), ("turn", 5, "first"), ("turn", 10**9, "mean")]
)
def test_the_shortest_are_tokens_and_the_longest_turns(
    tmp_path: Path, tokenizer: Any, given: str, tokens: int, pool: str, ratio: str
) -> None:
    """The same weights and metrics. No turn has more than five tokens; of one token, all pools are the same."""
    common = settings(tmp_path, importance_sampling_level=ratio, gamma=0.9, gae_lambda=0.8, log_turn_details=True)
    plain = {"advantage_level": given, "value_pool": "first" if given == "token" else pool}
    macro = {"advantage_level": "macro", "macro_action_tokens": tokens, "value_pool": pool}
    runs = [train(SOPPOTrainer, SOPPOConfig, tokenizer, **{**common, **level}) for level in (plain, macro)]
    assert_same(*runs)
    assert all(log["critic/value_loss"] > 0 for log in runs[0].state.log_history if "loss" in log)
