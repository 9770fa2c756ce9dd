"""Environments beyond search, in training: with a reward per turn, with several tools, with TRL's objects."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from sorl_trl import AgentRollout, SOGRPOConfig, SOGRPOTrainer
from sorl_trl.qa import environment_reward
from sorl_trl.rollout import EnvironmentResponder, Frame, Reply, Responder, RolloutLimits, TagProtocol, ToolBox
from sorl_trl.types import Observation, StopReason, Trajectory, Turn
from tests.agents import search_index
from tests.policies import DIGITS, acting_policy, acting_tokenizer
from tests.training import settings

WORDING = {"invalid_feedback": ":", "no_results": "2", "search_failed": "2", "passage_template": "{text}"}
FRAMES = {"information_frame": Frame(": ", " :"), "feedback_frame": Frame(), "message_frame": Frame()}
LIMITS = RolloutLimits(max_turns=3, max_turn_tokens=12, max_observation_tokens=12, max_trajectory_tokens=90)


def protocol(*tools: str) -> TagProtocol:
    return TagProtocol(tools=tools, **WORDING, **FRAMES)  # type: ignore[arg-type]


def build(tmp_path: Path, rollout: AgentRollout, reward: Any, trainer_class: Any = SOGRPOTrainer) -> Any:
    tokenizer = acting_tokenizer(rollout.protocol.tools)
    config, details = (
        (SOGRPOConfig, {"log_turn_details": True}) if trainer_class is SOGRPOTrainer else (GRPOConfig, {})
    )
    rows = [{"prompt": f"{1 + i % 3} :", "number": 1 + i % 3} for i in range(8)]
    arguments = settings(tmp_path, max_completion_length=90, max_steps=2, learning_rate=1e-3, **details)
    return trainer_class(
        acting_policy(tokenizer),
        reward,
        config(**arguments),
        Dataset.from_list(rows),
        processing_class=tokenizer,
        rollout_func=rollout,
    )


def logs(trainer: Any) -> list[dict[str, Any]]:
    """Of each generation batch."""
    return [entry for entry in trainer.state.log_history if "rollout/masked_share" in entry]


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

    rollout = AgentRollout(EnvironmentResponder(HighLow), protocol("guess"), LIMITS)
    trainer = build(tmp_path, rollout, [environment_reward, keep])
    trainer.train()
    assert len(seen) == 16
    for trajectory, state, number in seen:
        rewards = [turn.reward for turn in trajectory.turns if turn.reward is not None]
        assert state.number == number and state.left == 2 - len(rewards)
        assert (trajectory.stop_reason is StopReason.ENVIRONMENT_DONE) == (1.0 in rewards)
        assert 1.0 not in rewards[:-1]
        assert all("<answer>" not in each.text for each in trajectory.observations)
    assert {each.stop_reason for each, *_ in seen} >= {StopReason.ENVIRONMENT_DONE}
    first = logs(trainer)[0]
    assert first["rollout/tool_calls_per_trajectory"] > 0 and first["rollout/searches_per_trajectory"] == 0
    assert "rewards/environment_reward/mean" in first


def follow(a: int) -> str:
    """
    The next number.

    Args:
        a: A number.
    """
    return str(a + 1)


async def double(a: int) -> str:
    """
    Double.

    Args:
        a: A number.
    """
    return str(2 * a)


def test_tools_and_a_search_engine_are_trained_with_by_trls_trainer(tmp_path: Path) -> None:
    box = ToolBox([follow, double], search=search_index(tmp_path), protocol=protocol("search"), concurrency=4)
    seen: list[Trajectory] = []

    def reward(trajectory: Any, **_: Any) -> list[float]:
        seen.extend(trajectory)
        return [float(sum(turn.text.count("1") for turn in each.turns)) for each in trajectory]

    rollout = AgentRollout(box, limits=replace(LIMITS, max_trajectory_tokens=None))
    assert rollout.protocol is box.protocol
    trainer = build(tmp_path, rollout, reward, GRPOTrainer)
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    calls = [
        (turn.action.tool, turn.action.content, reply.text.split()[1:-1])
        for each in seen
        for turn, reply in pairwise(each.segments)
        if isinstance(turn, Turn) and isinstance(reply, Observation) and turn.action.content in DIGITS
    ]
    results = {"follow": lambda a: str(a + 1), "double": lambda a: str(2 * a)}
    assert {tool for tool, *_ in calls} >= {*results}
    for tool, content, words in calls:
        value = results[tool](int(content)) if tool else words[0]
        assert words == [value if value in DIGITS else "<unk>"], "the tool's result"
    assert all(sum(len(s.token_ids) for s in each.segments) <= 90 for each in seen), "`max_completion_length`"
    assert logs(trainer)[0]["rollout/tool_calls_per_trajectory"] > 0
    assert any(not torch.equal(before[name], now) for name, now in trainer.model.named_parameters())


class GuessingGame:
    """As it is written for TRL."""

    def reset(self, number: int = 2, **_: Any) -> str:
        self.number, self.won = number, False
        return " 3 <answer>"

    def guess(self, number: int) -> str:
        """
        Guess.

        Args:
            number: The number.
        """
        self.won = self.won or number == self.number
        return "3" if self.won else "2"

    def get_reward(self) -> float:
        return float(self.won)


def test_trls_objects_are_trained_in(tmp_path: Path) -> None:
    games = ToolBox(environment_factory=GuessingGame)
    seen: dict[str, list[Any]] = {"trajectory": [], "environments": [], "number": []}

    def keep(prompts: Any, **columns: Any) -> list[float]:
        for name, values in seen.items():
            values += columns[name]
        return [0.0] * len(prompts)

    worded = protocol(*games.protocol.tools)
    trainer = build(tmp_path, AgentRollout(games, worded, LIMITS), [*games.rewards, keep])
    trainer.train()
    assert all(type(each) is GuessingGame for each in seen["environments"])
    tokenizer = trainer._tokenizer
    for trajectory, game, number in zip(*seen.values(), strict=True):
        assert game.number == number
        assert tokenizer.decode(trajectory.prompt_ids) == f"{number} <unk> 3 <unk>", "without the tag"
        assert game.won == any(text.text == "<unk> 3 <unk>" for text in trajectory.observations)
    assert any(game.won for game in seen["environments"])
    log = logs(trainer)[0]
    assert log["rollout/neutralized_per_trajectory"] >= 1.0, "each greeting held a tag"
    assert "rewards/GuessingGame/mean" in log


def test_responders_are_closed_where_prompts_cannot_be_encoded(tmp_path: Path) -> None:
    class Counts(Responder):
        closed = 0

        def ask(self, turns: Any) -> Any:
            raise AssertionError("nothing is generated")

        def close(self) -> None:
            self.closed += 1

    responder = Counts()
    rollout = AgentRollout(responder, replace(protocol("guess"), message_frame=Frame(" ", " ")), LIMITS)
    trainer = build(tmp_path, rollout, lambda **_: [])
    with pytest.raises(ValueError, match="chat_template is not set"):
        rollout([[{"role": "user", "content": "guess"}]], trainer)
    assert responder.closed == 1
