"""From rewards and values to advantages and returns: hand-worked, against slow loops, and blind to what is masked."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sorl_trl.trainers.critic.experience import Experience, token_experience, turn_experience
from tests.ppo_losses import slow_gae

NAN = float("nan")
BUILDERS = [turn_experience, token_experience]


class TestHandWorked:
    """Turn 0 has two tokens, an observation follows, turn 1 has one token; the second trajectory has one turn."""

    turn_ids = torch.tensor([[0, 0, -1, 1], [-1, 0, 0, -1]])
    values = torch.tensor([[1.0, 2.0, 9.0, 3.0], [9.0, 0.5, 0.25, 9.0]])
    turn_rewards = torch.tensor([[0.5, 4.0], [1.0, 0.0]])

    def test_turns(self) -> None:
        """δ_0 = 0.5 + 0.5 · 3 − 1 = 1 and δ_1 = 4 − 3 = 1; Â_0 = 1 + 0.5 · 0.5 · 1; the second: 1 − 0.5."""
        experience = turn_experience(
            self.turn_rewards, torch.zeros(2, 4), self.values, self.turn_ids, gamma=0.5, gae_lambda=0.5
        )
        assert experience.values.tolist() == [[1.0, 3.0], [0.5, 0.0]]
        assert experience.advantages.tolist() == [[1.25, 1.0], [0.5, 0.0]]
        assert experience.returns.tolist() == [[2.25, 4.0], [1.0, 0.0]]
        assert experience.rewards_to_go.tolist() == [[2.5, 4.0], [1.0, 0.0]]
        assert experience.unit_turns.tolist() == [[0, 1], [0, -1]]
        assert experience.on_tokens(experience.advantages, self.turn_ids).tolist() == [
            [1.25, 1.25, 0.0, 1.0],
            [0.0, 0.5, 0.5, 0.0],
        ]

    def test_tokens(self) -> None:
        """Rewards 0, 0.5, 4 and values 1, 2, 3 in the first trajectory; 0, 1 and 0.5, 0.25 in the second."""
        experience = token_experience(
            self.turn_rewards, torch.zeros(2, 4), self.values, self.turn_ids, gamma=0.5, gae_lambda=0.5
        )
        # δ = 0 + 1 − 1, 0.5 + 1.5 − 2, 4 − 3 and 0 + 0.125 − 0.5, 1 − 0.25; discount · λ = 0.25.
        assert experience.advantages.tolist() == [[0.0625, 0.25, 0.0, 1.0], [0.0, -0.1875, 0.75, 0.0]]
        assert experience.returns.tolist() == [[1.0625, 2.25, 0.0, 4.0], [0.0, 0.3125, 1.0, 0.0]]
        assert experience.rewards_to_go.tolist() == [[1.25, 2.5, 0.0, 4.0], [0.0, 0.5, 1.0, 0.0]]
        assert experience.unit_turns is self.turn_ids
        assert experience.on_tokens(experience.advantages, self.turn_ids) is experience.advantages

    @pytest.mark.parametrize("build", BUILDERS)
    def test_token_rewards_are_added(self, build: Callable[..., Experience]) -> None:
        penalties = torch.tensor([[-1.0, -2.0, 100.0, -4.0], [100.0, -8.0, -16.0, 100.0]])
        experience = build(self.turn_rewards, penalties, self.values, self.turn_ids, 1.0, 1.0)
        first = experience.on_tokens(experience.rewards_to_go, self.turn_ids)
        if build is turn_experience:
            assert first.tolist() == [[-2.5, -2.5, 0.0, 0.0], [0.0, -23.0, -23.0, 0.0]]
        else:
            assert first.tolist() == [[-2.5, -1.5, 0.0, 0.0], [0.0, -23.0, -15.0, 0.0]]


@st.composite
def trajectories(draw: st.DrawFn) -> dict[str, Any]:
    """1 to 3 rows of up to 4 turns, with gaps or without; the last row may have no turn at all."""
    rows: list[list[int]] = []
    for _ in range(draw(st.integers(1, 3))):
        row: list[int] = [-1] * draw(st.integers(0, 2))
        for turn in range(draw(st.integers(0, 4))):
            row += [turn] * draw(st.integers(1, 3)) + [-1] * draw(st.integers(0, 2))
        rows.append(row)
    width = max(1, *map(len, rows))
    turn_ids = torch.tensor([row + [-1] * (width - len(row)) for row in rows])
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    turns = int(turn_ids.max()) + 1
    return {
        "turn_rewards": torch.randn(len(rows), turns, generator=generator),
        "token_rewards": torch.randn(len(rows), width, generator=generator),
        "values": torch.randn(len(rows), width, generator=generator),
        "turn_ids": turn_ids,
        "gamma": draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        "gae_lambda": draw(st.sampled_from([0.0, 0.5, 0.95, 1.0])),
    }


def slow_units(case: dict[str, Any], row: int, per_turn: bool) -> tuple[list[list[int]], list[float], list[float]]:
    """Of one trajectory: the tokens, the reward and the value of each unit."""
    turn_ids = case["turn_ids"][row].tolist()
    spans = [[t for t, turn in enumerate(turn_ids) if turn == k] for k in range(max(turn_ids) + 1)]
    tokens = spans if per_turn else [[t] for t, turn in enumerate(turn_ids) if turn >= 0]
    rewards = [sum(case["token_rewards"][row, t].item() for t in unit) for unit in tokens]
    for k, span in enumerate(spans):
        unit = next(i for i, unit in enumerate(tokens) if span[-1] in unit)
        rewards[unit] += case["turn_rewards"][row, k].item()
    return tokens, rewards, [case["values"][row, unit[0]].item() for unit in tokens]


@pytest.mark.parametrize("build", BUILDERS)
@given(case=trajectories())
def test_slow_loops_agree(build: Callable[..., Experience], case: dict[str, Any]) -> None:
    experience = build(**case)
    gamma, lam = case["gamma"], case["gae_lambda"]
    expected = {name: torch.zeros(case["values"].shape) for name in ("advantages", "returns", "rewards_to_go")}
    for row in range(len(case["turn_ids"])):
        tokens, rewards, values = slow_units(case, row, build is turn_experience)
        advantages = slow_gae(rewards, values, gamma, lam)
        to_go = slow_gae(rewards, [0.0] * len(rewards), gamma, 1.0)
        for unit, advantage, value, reward in zip(tokens, advantages, values, to_go, strict=True):
            expected["advantages"][row, unit] = advantage
            expected["returns"][row, unit] = advantage + value
            expected["rewards_to_go"][row, unit] = reward
    for name, tensor in expected.items():
        ours = experience.on_tokens(getattr(experience, name), case["turn_ids"])
        torch.testing.assert_close(ours, tensor, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("garbage", [NAN, math.inf, 1e30])
@pytest.mark.parametrize("build", BUILDERS)
@given(case=trajectories())
def test_what_is_not_the_policys_never_enters(
    build: Callable[..., Experience], garbage: float, case: dict[str, Any]
) -> None:
    clean = build(**case)
    off = case["turn_ids"] < 0
    present = torch.arange(case["turn_rewards"].shape[1]) <= case["turn_ids"].amax(1, keepdim=True)
    dirty = {name: torch.where(off, garbage, case[name]) for name in ("token_rewards", "values")}
    dirty["turn_rewards"] = torch.where(present, case["turn_rewards"], garbage)
    assert_same(build(**{**case, **dirty}), clean)


@given(case=trajectories())
def test_only_where_a_turn_starts_is_its_value_read(case: dict[str, Any]) -> None:
    """Values within a turn belong to states in which no turn starts."""
    inside = torch.zeros_like(case["values"], dtype=torch.bool)
    for row, turn_ids in enumerate(case["turn_ids"].tolist()):
        seen: set[int] = set()
        for t, turn in enumerate(turn_ids):
            inside[row, t] = turn in seen
            seen.add(turn)
    dirty = {**case, "values": torch.where(inside, NAN, case["values"])}
    assert_same(turn_experience(**dirty), turn_experience(**case))


def assert_same(a: Experience, b: Experience) -> None:
    for name in ("values", "advantages", "returns", "rewards_to_go", "unit_turns"):
        first, second = getattr(a, name), getattr(b, name)
        assert isinstance(first, Tensor)
        assert torch.equal(first, second), name


@pytest.mark.parametrize("build", BUILDERS)
def test_monte_carlo_with_lambda_one(build: Callable[..., Experience]) -> None:
    """At γ = λ = 1 an advantage is the reward to go less the value, whatever the critic says later."""
    case = TestHandWorked
    experience = build(case.turn_rewards, torch.zeros(2, 4), case.values, case.turn_ids, 1.0, 1.0)
    torch.testing.assert_close(experience.returns, experience.rewards_to_go)
    torch.testing.assert_close(experience.advantages, experience.rewards_to_go - experience.values)


@pytest.mark.parametrize("build", BUILDERS)
def test_without_any_turn(build: Callable[..., Experience]) -> None:
    turn_ids = torch.full((2, 3), -1)
    experience = build(torch.zeros(2, 0), torch.zeros(2, 3), torch.full((2, 3), NAN), turn_ids, 1.0, 1.0)
    for units in (experience.advantages, experience.returns):
        assert torch.equal(experience.on_tokens(units, turn_ids), torch.zeros(2, 3))
