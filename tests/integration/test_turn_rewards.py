"""Turn rewards through the trainer: from what a function returns to the advantages of each token."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from sorl_trl import SOGRPOConfig, SOGRPOTrainer
from sorl_trl.qa import exact_match_reward, search_hit_turn_reward
from tests.agents import build_agent, questions
from tests.conftest import build_policy
from tests.contract.test_trl_parity import settings, train
from tests.trajectories import FixedRollout, parity_reward, prompts


class TestTurnRewards:
    def test_advantages_are_those_of_the_formula(self, tmp_path: Path, tokenizer: Any) -> None:
        """Against loops: returns with discount, the mean over trajectories of turn means, and the spread around it."""
        gamma = 0.5

        def steps(turn_ids: Any, **_: Any) -> list[list[float]]:
            return [[float(k + i % 3) for k in range(max(row) + 1)] for i, row in enumerate(turn_ids)]

        arguments = settings(tmp_path, gamma=gamma)
        trainer = SOGRPOTrainer(
            build_policy(), [steps, parity_reward], SOGRPOConfig(**arguments, reward_weights=[1.0, 2.0]), prompts(),
            processing_class=tokenizer, rollout_func=FixedRollout(),
        )  # fmt: skip
        rewards: dict[str, Any] = {}
        trainer.reward_funcs[1] = lambda **kwargs: rewards.setdefault("outcome", parity_reward(**kwargs))
        batch = trainer._generate_and_score_completions([dict(row) for row in prompts(2) for _ in range(4)])
        returns = []
        for i in range(8):
            count = int(batch["turn_ids"][i].max()) + 1
            turn_rewards = [float(k + i % 3) for k in range(count)]
            turn_rewards[-1] += 2.0 * rewards["outcome"][i]
            returns.append([sum(gamma ** (j - k) * turn_rewards[j] for j in range(k, count)) for k in range(count)])
        for group in (range(4), range(4, 8)):
            baseline = sum(sum(returns[i]) / len(returns[i]) for i in group) / 4
            spread = sum(sum((r - baseline) ** 2 for r in returns[i]) / len(returns[i]) for i in group) / 3
            for i in group:
                for k, value in enumerate(returns[i]):
                    expected = (value - baseline) / (math.sqrt(spread) + 1e-4)
                    got = batch["advantages"][i][batch["turn_ids"][i] == k]
                    assert got.tolist() == pytest.approx([expected] * len(got), abs=1e-5)
        assert (batch["advantages"][batch["turn_ids"] < 0] == 0).all()

    def test_an_outcome_given_as_a_turn_reward_is_trls_advantage(self, tmp_path: Path, tokenizer: Any) -> None:
        def as_turns(turn_ids: Any, **kwargs: Any) -> list[list[float]]:
            outcomes = parity_reward(**kwargs)
            return [[0.0] * max(row) + [reward] for row, reward in zip(turn_ids, outcomes, strict=True)]

        arguments = settings(tmp_path, loss_type="grpo", importance_sampling_level="token", clip_normalization="none")
        by_turns = train(SOGRPOTrainer, SOGRPOConfig, tokenizer, **arguments, reward_funcs=as_turns)
        by_outcome = train(SOGRPOTrainer, SOGRPOConfig, tokenizer, **arguments)
        for a, b in zip(by_turns.model.parameters(), by_outcome.model.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)  # eight steps of Adam on rounding differences

    @pytest.mark.parametrize("scale", ["group", "batch", "none"])
    def test_every_scaling(self, tmp_path: Path, scale: str) -> None:
        rewards = [exact_match_reward, search_hit_turn_reward]
        trainer = build_agent(tmp_path, reward_funcs=rewards, scale_rewards=scale)
        trainer.train()
        assert all(math.isfinite(log["loss"]) for log in trainer.state.log_history if "loss" in log)

    def test_normalize_then_sum_is_refused(self, tmp_path: Path) -> None:
        rewards = [exact_match_reward, search_hit_turn_reward]
        trainer = build_agent(tmp_path, reward_funcs=rewards, multi_objective_aggregation="normalize_then_sum")
        with pytest.raises(ValueError, match="multi_objective_aggregation"):
            trainer.train()

    def test_the_completions_table_shows_the_mean_over_turns(self, tmp_path: Path) -> None:
        trainer = build_agent(tmp_path, gamma=0.9, max_steps=1)
        batch = trainer._generate_and_score_completions([dict(row) for row in questions(4) for _ in range(4)])
        for shown, advantages, turn_ids in zip(
            trainer._logs["advantages"], batch["advantages"], batch["turn_ids"], strict=True
        ):
            turns = [advantages[turn_ids == k][0].item() for k in range(int(turn_ids.max()) + 1)]
            assert shown == pytest.approx(sum(turns) / len(turns), abs=1e-6)
