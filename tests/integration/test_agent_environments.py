"""Environments of one's own in training: a reward per turn, and an end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from sorl_trl import AgentRollout, SOGRPOConfig, SOGRPOTrainer
from sorl_trl.qa import environment_reward
from sorl_trl.rollout import EnvironmentResponder, Frame, Reply, Responder, RolloutLimits, TagProtocol
from sorl_trl.types import StopReason, Trajectory, Turn
from tests.policies import acting_policy, acting_tokenizer
from tests.training import settings

PROTOCOL = TagProtocol(
    tools=("guess",),
    invalid_feedback=":",
    information_frame=Frame(": ", " :"),
    feedback_frame=Frame(),
    message_frame=Frame(" ", " "),
)
LIMITS = RolloutLimits(max_turns=3, max_turn_tokens=12, max_observation_tokens=12, max_trajectory_tokens=90)


def build(tmp_path: Path, responder: Responder, reward: Any) -> SOGRPOTrainer:
    tokenizer = acting_tokenizer(PROTOCOL.tools)
    rows = [{"prompt": f"{1 + i % 3} :", "number": 1 + i % 3} for i in range(8)]
    config = SOGRPOConfig(**settings(tmp_path, max_completion_length=90, max_steps=2, learning_rate=1e-3))
    return SOGRPOTrainer(
        acting_policy(tokenizer),
        reward,
        config,
        Dataset.from_list(rows),
        processing_class=tokenizer,
        rollout_func=AgentRollout(responder, PROTOCOL, LIMITS),
    )


class HighLow:
    """Stateful: the guesses that are left; a reward for each, and an end."""

    def reset(self, number: int) -> None:
        self.number, self.left = number, 2

    def step(self, turn: Turn) -> Reply:
        self.left -= 1
        if turn.action.content == str(self.number):
            return Reply(reward=1.0, stop=StopReason.ENVIRONMENT_DONE)
        return Reply(f"3 <answer> {self.left}", reward=-0.5)


def test_a_stateful_environment_is_trained_in(tmp_path: Path) -> None:
    seen: list[tuple[Trajectory, HighLow, int]] = []

    def keep(trajectory: Any, environments: Any, number: Any, **_: Any) -> list[float]:
        seen.extend(zip(trajectory, environments, number, strict=True))
        return [float(len(each.turns)) for each in trajectory]

    trainer = build(tmp_path, EnvironmentResponder(HighLow), [environment_reward, keep])
    trainer.train()
    assert len(seen) == 16
    for trajectory, state, number in seen:
        rewards = [turn.reward for turn in trajectory.turns if turn.reward is not None]
        assert state.number == number and state.left == 2 - len(rewards)
        assert (trajectory.stop_reason is StopReason.ENVIRONMENT_DONE) == (1.0 in rewards)
        assert 1.0 not in rewards[:-1]
        assert all("<answer>" not in each.text for each in trajectory.observations)
    assert {each.stop_reason for each, *_ in seen} >= {StopReason.ENVIRONMENT_DONE}
    (first, *_) = [entry for entry in trainer.state.log_history if "rollout/tool_calls_per_trajectory" in entry]
    assert first["rollout/tool_calls_per_trajectory"] > 0 and first["rollout/searches_per_trajectory"] == 0
    assert "rewards/environment_reward/mean" in first


def test_responders_are_closed_where_prompts_cannot_be_encoded(tmp_path: Path) -> None:
    class Counts(Responder):
        closed = 0

        def ask(self, turns: Any) -> Any:
            raise AssertionError("nothing is generated")

        def close(self) -> None:
            self.closed += 1

    responder = Counts()
    trainer = build(tmp_path, responder, lambda **_: [])
    with pytest.raises(ValueError, match="chat_template is not set"):
        trainer.rollout_func([[{"role": "user", "content": "guess"}]], trainer)
    assert responder.closed == 1
