"""Rollouts whose trajectories have several contexts: trained, resumed, shown and rewarded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sorl_trl import SOGRPOConfig, SOGRPOTrainer
from sorl_trl.records.trained import read_trained
from sorl_trl.records.view import training_entry
from sorl_trl.rollout.policy_rollout import rollout_output
from sorl_trl.rollout.trajectories import closed
from tests.policies import build_policy
from tests.training import settings
from tests.trajectories import SeveralContexts, parity_reward, prompts
from tests.unit.evaluation.trajectories import TWO_AGENTS

pytestmark = pytest.mark.trains


def build(trainer_class: Any, config_class: Any, folder: Path, tokenizer: Any, **overrides: Any) -> Any:
    reward = overrides.pop("reward_funcs", parity_reward)
    rollout = overrides.pop("rollout_func", None) or SeveralContexts()
    args = config_class(**settings(folder, **overrides))
    torch.manual_seed(0)
    return trainer_class(build_policy(), reward, args, prompts(), processing_class=tokenizer, rollout_func=rollout)


def test_what_is_kept_names_agents_and_who_spoke_after_each_turn(tmp_path: Path, tokenizer: Any) -> None:
    def agents(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return rollout_output(closed([TWO_AGENTS] * len(prompts), tokenizer.eos_token_id))

    fields = {"rollout_func": agents, "max_steps": 1, "save_trajectories_steps": 1}
    build(SOGRPOTrainer, SOGRPOConfig, tmp_path, tokenizer, **fields).train()
    kept = next(read_trained(tmp_path))
    assert kept.agents == ("planner", "searcher", "searcher", "searcher", "planner")
    assert kept.roles == ("user", "", "tool", "user", "")
    columns = ("agent", "context", "role")
    assert [tuple(segment.get(name) for name in columns) for segment in training_entry(kept, "k").segments] == [
        *(("planner", 0, None), (None, 1, None), (None, 1, "user"), ("searcher", 1, None)),
        *((None, 2, None), ("searcher", 2, None), (None, 1, "tool"), ("searcher", 1, None)),
        *((None, 0, "user"), ("planner", 0, None), (None, 0, None)),
    ]


def test_what_a_context_repeats_is_told_once(tmp_path: Path, tokenizer: Any) -> None:
    """To reward functions and in the table of completions; ids and turns are all there."""
    seen: dict[str, Any] = {}

    def reward(completions: list[str], completion_ids: Any, turn_ids: Any, **_: Any) -> list[float]:
        seen.update(texts=completions, ids=completion_ids, turns=turn_ids)
        return [float(len(ids)) for ids in completion_ids]

    trainer = build(SOGRPOTrainer, SOGRPOConfig, tmp_path, tokenizer, reward_funcs=reward, max_steps=1)
    trainer.train()
    assert list(trainer._logs["completion"]) == seen["texts"]
    told = SeveralContexts()(["w0 w1"] * len(seen["ids"]), trainer)
    for text, ids, contexts in zip(seen["texts"], told["completion_ids"], told["context_ids"], strict=True):
        shown = [token for token, context in zip(ids, contexts, strict=True) if context >= 0]
        assert text == tokenizer.decode(shown, skip_special_tokens=True)
    assert any(min(contexts) < 0 for contexts in told["context_ids"])
    assert [len(row) for row in seen["turns"]] == [len(row) for row in seen["ids"]]
    assert trainer.state.log_history[0]["completions/max_length"] == max(
        sum(turn >= 0 for turn in row) for row in seen["turns"]
    )
