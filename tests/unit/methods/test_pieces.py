"""Credit and keep on a rollout written by hand, and how a recipe names pieces."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_trl import SOGRPOConfig
from sorl_trl.methods import (
    METHODS,
    AgentWise,
    Clip,
    ClipPenalty,
    GiGPO,
    GroupMean,
    LeaveOneOut,
    Method,
    ScoredRollout,
    ZeroVariance,
    method_from,
)
from sorl_trl.ops import turn_layout

TURN_IDS = torch.tensor([[0, -1, 1], [0, 0, -1], [0, -1, 1], [0, -1, -1]])
"""Two groups of two: trajectories of 2, 1, 2 and 1 turns."""
OUTCOMES = torch.tensor([1.0, 0.0, 0.5, 0.5])


def rollout(turn_ids: Tensor = TURN_IDS, outcomes: Tensor = OUTCOMES, **fields: Any) -> ScoredRollout:
    """Trajectories with outcomes alone, NaN where there is none, or as set by `fields`."""
    turns = turn_layout(turn_ids)
    nothing = torch.zeros(turns.turn_mask.shape, dtype=outcomes.dtype)
    given: dict[str, Any] = {
        "turns": turns,
        "rewards_per_func": outcomes.unsqueeze(1),
        "reward_names": ["outcome"],
        "reward_weights": torch.ones(1),
        "turn_rewards": nothing,
        "has_turn_reward": nothing.bool(),
        "outcomes": outcomes.nan_to_num(),
        "states": nothing.long(),
        "num_generations": 2,
        "gamma": 1.0,
        **fields,
    }
    return ScoredRollout(**given)


def test_outcomes_alone_give_trajectories_the_advantages_of_grpo() -> None:
    assert GroupMean("none")(rollout()).tolist() == [0.5, -0.5, 0.0, 0.0]


def test_rewards_of_turns_cannot_be_normalized_one_by_one() -> None:
    with pytest.raises(ValueError, match="`multi_objective_aggregation` is 'normalize_then_sum'"):
        GroupMean(aggregation="normalize_then_sum")(rollout(gamma=0.5))


def test_group_mean_discounts_towards_the_first_turn() -> None:
    found = GroupMean("none")(rollout(gamma=0.5))
    # Returns: (.5, 1), (0), (.25, .5), (.5). Of its group, one trajectory has turn 1, whose baseline grows with it.
    expected = [[0.5 - 0.25, 1 - 0.75], [-0.25, 0], [0.25 - 0.375, 0.5 - 0.625], [0.5 - 0.375, 0]]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_leave_one_out_compares_with_the_others() -> None:
    found = LeaveOneOut()(rollout())
    torch.testing.assert_close(found, torch.tensor([[1.0, 1.0], [-1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]))


def test_gigpo_adds_what_turns_of_one_state_differ_by() -> None:
    # First turns of a group share the prompt's state: returns 1 and 0, so +.5 and -.5 beside the group's own.
    found = GiGPO(2.0, "none")(rollout(states=torch.tensor([[7, 1], [7, 0], [8, 2], [8, 0]])))
    torch.testing.assert_close(found, torch.tensor([[1.5, 0.5], [-1.5, 0.0], [0.0, 0.0], [0.0, 0.0]]))


def test_groups_are_kept_by_how_they_differ() -> None:
    assert ZeroVariance()(rollout()).tolist() == [True, True, False, False]
    rewards = torch.tensor([1.0, 0.0, 0.9, 0.5]).unsqueeze(1)
    both = rollout(rewards_per_func=rewards)
    assert ZeroVariance()(both).all()


def test_a_named_reward_decides() -> None:
    two = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.5, 0.3], [0.5, 0.7]])
    given = rollout(rewards_per_func=two, reward_names=["outcome", "format"], reward_weights=torch.ones(2))
    assert ZeroVariance("format")(given).tolist() == [False, False, True, True]
    with pytest.raises(ValueError, match="`reward` is 'x'"):
        ZeroVariance("x")(given)


def test_an_unscored_trajectory_is_compared_with_nobody() -> None:
    given = rollout(outcomes=torch.tensor([1.0, math.nan, 0.5, 0.5]), gamma=0.5)
    found = GroupMean("none")(given)
    assert found is not None
    assert found[1].tolist() == [0.0, 0.0]
    assert found[0].tolist() == [0.0, 0.0]  # alone in its group
    assert found[2].tolist() == [-0.125, -0.125]
    assert torch.isnan(given.totals()).tolist() == [False, True, False, False]


class TestDrMAS:
    """Each agent's turns are compared with the turns of the same agent in the group."""

    AGENTS = torch.tensor([[0, 1, 0, 2], [1, -1, -1, -1], [0, 0, 1, -1], [1, 0, 1, 0]] * 2)
    """In groups of four. The third acts once in a group."""

    def rollout(self, agents: Tensor = AGENTS, outcomes: Tensor | None = None, **fields: Any) -> ScoredRollout:
        """Turns of one token, in groups of four and in float64."""
        if outcomes is None:
            outcomes = torch.randn(len(agents), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        steps = torch.arange(agents.size(1)).expand_as(agents)
        given = {"agents": agents, "agent_names": ("a", "b", "c"), "num_generations": 4, **fields}
        return rollout(torch.where(agents >= 0, steps, -1), outcomes, **given)

    def test_two_agents_by_hand(self) -> None:
        """The first has the returns 1, 1, 0 and 4; the second has 1 and 0."""
        agents = torch.tensor([[0, 1, 0], [0, 1, -1], [0, -1, -1]])
        given = self.rollout(agents, torch.tensor([1.0, 0.0, 4.0]), num_generations=3)
        found = AgentWise("none")(given)
        torch.testing.assert_close(found, torch.tensor([[-0.5, 0.5, -0.5], [-1.5, -0.5, 0.0], [2.5, 0.0, 0.0]]))

    def test_who_is_not_scored_counts_for_nothing_and_groups_and_names_do_not_mix(self) -> None:
        arm = AgentWise()
        outcomes = self.rollout().outcomes
        outcomes[1] = math.nan
        found = arm(self.rollout(outcomes=outcomes))
        assert found[1].tolist() == [0.0] * 4 and found.isfinite().all()
        alone = [arm(self.rollout(self.AGENTS[i : i + 4], outcomes[i : i + 4])) for i in (0, 4)]
        torch.testing.assert_close(found, torch.cat(alone), rtol=0, atol=0)
        fewer = arm(self.rollout(torch.where(outcomes.isnan().unsqueeze(1), -1, self.AGENTS), outcomes))
        torch.testing.assert_close(found, fewer, rtol=0, atol=0)
        renamed = torch.tensor([2, 0, 1, -1])[self.AGENTS]
        torch.testing.assert_close(arm(self.rollout(renamed, outcomes)), found, rtol=0, atol=1e-12)

    def test_without_names_nobody_is_compared(self) -> None:
        with pytest.raises(ValueError, match="names no agents"):
            AgentWise()(replace(self.rollout(), agents=None))
        nobody = self.rollout(outcomes=torch.full((8,), math.nan))
        assert AgentWise()(replace(nobody, agents=None)).count_nonzero() == 0


def read(value: Any) -> Method:
    return method_from(value, SOGRPOConfig("out", use_cpu=True, bf16=False))


class TestParsing:
    def test_a_name_a_mapping_json_and_a_method(self) -> None:
        keep = ZeroVariance(), ZeroVariance("f1")
        expected = Method(credit=GiGPO(coef=0.5), keep=keep, terms=(ClipPenalty(coef=2.0),))
        mapping = {
            "credit": {"gigpo": {"coef": 0.5}},
            "keep": ["zero_variance", {"zero_variance": {"reward": "f1"}}],
            "terms": {"clip_penalty": {"coef": 2.0}},
        }
        assert read(mapping) == read(str(mapping).replace("'", '"')) == read(expected) == expected
        assert read("loop") == METHODS["loop"]
        varied = {"name": "loop", "gamma": 0.9, "clip": {"low": 0.1}, "keep": ZeroVariance()}
        assert read(varied) == replace(METHODS["loop"], gamma=0.9, clip=Clip(0.1), keep=(ZeroVariance(),))

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ("lop", r"`method` is 'lop'.*did you mean loop\?"),
            (3, "`method` is 3"),
            ({"credits": "gigpo"}, "`method` has 'credits'"),
            ({"credit": "gigp"}, r"`method\.credit` is 'gigp'.*did you mean gigpo\?"),
            ({"keep": [{"zero_variance": {"rewards": "f1"}}]}, r"`method\.keep\.zero_variance` has 'rewards'"),
            ({"weight": {"turn_ratio": {"high": 2}}}, "removed; .*vllm_importance_sampling_mode"),
            ("llds", "removed; .* showed no gain"),
            ("igpo", "removed; .* examples/information_gain.py"),
            ({"keep": ["top_k"]}, "removed; .* 'zero_variance' drops groups"),
            ({"credit": {"gigpo": {"coef": -1}}}, "`coef` is -1"),
            ({"terms": {"clip_penalty": {"gate": "turn"}}}, "has 'gate', but takes coef, epsilon"),
            ('{"credit": ', "`method`"),
            ({"name": "lop"}, r"did you mean loop\?"),
            ({"clip": {"epsilon": 0.1}}, r"`method\.clip` has 'epsilon', but takes low, high"),
            ({"ratio": "token"}, "`ratio` is 'token', but must be a `Ratio`"),
            ({"gamma": 1.5}, "`gamma` is 1.5"),
        ],
    )
    def test_what_is_wrong_is_named(self, value: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            read(value)

    def test_a_piece_must_be_a_function(self) -> None:
        with pytest.raises(ValueError, match=r"`keep` is .*, but must be a tuple"):
            Method(keep=ZeroVariance())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="`surrogate` has 3, but must be a function"):
            Method(surrogate=3)  # type: ignore[arg-type]
