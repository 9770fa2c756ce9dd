"""Credit and keep on a rollout written by hand, and how a recipe names pieces."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from sorl_trl.methods import (
    DPPO,
    LLDS,
    METHODS,
    ClipPenalty,
    ClipRange,
    DoubleSided,
    EngineTurnMask,
    EngineVeto,
    GiGPO,
    GroupMean,
    LeaveOneOut,
    Method,
    MicroBatch,
    MiniRL,
    NotVoid,
    PPOMin,
    ScoredRollout,
    Separate,
    TopK,
    TopP,
    TurnRatio,
    Unweighted,
    ZeroVariance,
    method_from,
)
from sorl_trl.ops import turn_layout

NAN = math.nan
TURN_IDS = torch.tensor([[0, -1, 1], [0, 0, -1], [0, -1, 1], [0, -1, -1]])
"""Two groups of two: trajectories of 2, 1, 2 and 1 turns."""


def rollout(**fields: Any) -> ScoredRollout:
    outcomes = torch.tensor([1.0, 0.0, 0.5, 0.5])
    given: dict[str, Any] = {
        "turns": turn_layout(TURN_IDS),
        "rewards_per_func": outcomes.unsqueeze(1),
        "reward_names": ["outcome"],
        "reward_weights": torch.ones(1),
        "turn_rewards": torch.zeros(4, 2),
        "has_turn_reward": torch.zeros(4, 2, dtype=torch.bool),
        "outcomes": outcomes,
        "has_outcome": torch.ones(4, dtype=torch.bool),
        "states": torch.tensor([[7, 1], [7, 0], [8, 2], [8, 0]]),
        "num_generations": 2,
        "gamma": 1.0,
        "scale": "none",
        **fields,
    }
    return ScoredRollout(**given)


def test_outcomes_alone_leave_the_advantages_to_trl() -> None:
    assert GroupMean()(rollout()) is None


def test_group_mean_discounts_towards_the_first_turn() -> None:
    found = GroupMean()(rollout(gamma=0.5))
    # Returns: (.5, 1), (0), (.25, .5), (.5). Of its group, one trajectory has turn 1, whose baseline grows with it.
    expected = [[0.5 - 0.25, 1 - 0.75], [-0.25, 0], [0.25 - 0.375, 0.5 - 0.625], [0.5 - 0.375, 0]]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_leave_one_out_compares_with_the_others() -> None:
    found = LeaveOneOut()(rollout())
    torch.testing.assert_close(found, torch.tensor([[1.0, 1.0], [-1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]))


def test_gigpo_adds_what_turns_of_one_state_differ_by() -> None:
    # First turns of a group share the prompt's state: returns 1 and 0, so +.5 and -.5 beside the group's own.
    found = GiGPO(coef=2.0)(rollout())
    torch.testing.assert_close(found, torch.tensor([[1.5, 0.5], [-1.5, 0.0], [0.0, 0.0], [0.0, 0.0]]))


def test_separate_normalizes_turn_rewards_and_outcomes_apart() -> None:
    has = torch.tensor([[True, False], [False, False], [True, True], [False, False]])
    given = rollout(turn_rewards=torch.tensor([[4.0, 0.0], [0.0, 0.0], [1.0, 3.0], [0.0, 0.0]]), has_turn_reward=has)
    # A turn reward that is missing is no 0: alone in its group it is its own mean; 1 and 3 are ±1 off theirs.
    expected = [[0.0 + 0.5, 0.5], [-0.5, 0.0], [-1.0 + 1.0, 1.0], [0.0, 0.0]]
    torch.testing.assert_close(Separate()(given), torch.tensor(expected))


def test_groups_are_kept_by_how_they_differ() -> None:
    assert ZeroVariance()(rollout()).tolist() == [True, True, False, False]
    rewards = torch.tensor([1.0, 0.0, 0.9, 0.5]).unsqueeze(1)
    both = rollout(rewards_per_func=rewards)
    assert ZeroVariance()(both).all()
    assert TopK(0.5)(both).tolist() == [True, True, False, False]
    assert TopP(0.5)(both).tolist() == [True, True, False, False]
    assert TopP(1.0)(both).all()


def test_a_named_reward_decides() -> None:
    two = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.5, 0.3], [0.5, 0.7]])
    given = rollout(rewards_per_func=two, reward_names=["outcome", "format"], reward_weights=torch.ones(2))
    assert ZeroVariance("format")(given).tolist() == [False, False, True, True]
    with pytest.raises(ValueError, match=r"`reward` is 'x', but must be .*'outcome', 'format'"):
        ZeroVariance("x")(given)


def test_void_trajectories_are_left_out_where_the_rollout_says_so() -> None:
    void = torch.tensor([False, True, False, False])
    assert NotVoid()(rollout(void=void)).tolist() == [True, False, True, True]
    with pytest.raises(ValueError, match="does not say what its turns did"):
        NotVoid()(rollout())


def test_engine_pieces_read_the_mismatch() -> None:
    mismatch = torch.zeros(4, 3)
    mismatch[0, 2], mismatch[1, 0] = math.log(1.5), math.log(1e-5)
    given = rollout(mismatch=mismatch)
    assert EngineVeto()(given).tolist() == [True, False, True, True]
    kept = EngineTurnMask(0.8, 1.2)(given)
    assert kept.tolist() == [[True, True, False], [False, False, True], [True] * 3, [True] * 3]


def test_an_unscored_trajectory_is_compared_with_nobody() -> None:
    given = rollout(
        rewards_per_func=torch.tensor([[1.0], [NAN], [0.5], [0.5]]),
        outcomes=torch.tensor([1.0, 0.0, 0.5, 0.5]),
        has_outcome=torch.tensor([True, False, True, True]),
        gamma=0.5,
    )
    found = GroupMean()(given)
    assert found is not None
    assert found[1].tolist() == [0.0, 0.0]
    assert found[0].tolist() == [0.0, 0.0]  # alone in its group
    assert found[2].tolist() == [-0.125, -0.125]
    assert torch.isnan(given.totals()).tolist() == [False, True, False, False]


@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
@pytest.mark.parametrize("turn_ratio", ["geometric", "arithmetic"])
def test_the_token_that_decides_keeps_its_credit(level: str, turn_ratio: str) -> None:
    """A turn of 20 tokens, one of which has an advantage: it alone is moved, by as much as with token ratios."""
    log_ratio = torch.full((1, 20), 0.05, dtype=torch.float64, requires_grad=True)
    advantages = torch.nn.functional.one_hot(torch.tensor([7]), 20).double()
    of_token = ClipRange(0.2, 0.2)
    batch = MicroBatch(
        logps=log_ratio,
        old_logps=torch.zeros_like(log_ratio),
        sampling_logps=torch.zeros_like(log_ratio),
        log_ratio=log_ratio,
        turns=turn_layout(torch.zeros(1, 20, dtype=torch.long)),
        advantages=advantages,
        level=level,
        turn_ratio=turn_ratio,
        token_range=of_token,
        turn_range=of_token,
        clip_range=of_token,
    )
    (moved,) = torch.autograd.grad(PPOMin()(batch).value.sum(), log_ratio)
    torch.testing.assert_close(moved, advantages * math.exp(0.05))


class TestParsing:
    def test_a_name_a_mapping_json_and_a_method(self) -> None:
        expected = Method(credit=GiGPO(coef=0.5), keep=(ZeroVariance(), TopK(0.5)), terms=(ClipPenalty(coef=2.0),))
        mapping = {
            "credit": {"gigpo": {"coef": 0.5}},
            "keep": ["zero_variance", {"top_k": {"share": 0.5}}],
            "terms": {"clip_penalty": {"coef": 2.0}},
        }
        assert method_from(mapping) == expected
        assert method_from(str(mapping).replace("'", '"')) == expected
        assert method_from(expected) is expected
        assert method_from("loop") is METHODS["loop"]

    def test_every_piece_has_its_name(self) -> None:
        """By the names that recipes have, each piece with its default arguments."""
        mapping = {
            "keep": ["zero_variance", "top_k", "top_p", "not_void", "engine_veto", "engine_turn_mask"],
            "terms": ["clip_penalty", "llds"],
        }
        expected = Method(
            keep=(ZeroVariance(), TopK(), TopP(), NotVoid(), EngineVeto(), EngineTurnMask()),
            terms=(ClipPenalty(), LLDS()),
        )
        assert method_from(mapping) == expected
        single = [
            *[{"credit": name} for name in ("group_mean", "leave_one_out", "gigpo", "separate")],
            *[{"weight": name} for name in ("turn_ratio", "unweighted")],
            *[{"surrogate": name} for name in ("ppo_min", "double_sided", "minirl", "dppo")],
        ]
        assert [method_from(each) for each in single] == [
            *[Method(credit=piece) for piece in (GroupMean(), LeaveOneOut(), GiGPO(), Separate())],
            *[Method(weight=piece) for piece in (TurnRatio(), Unweighted())],
            *[Method(surrogate=piece) for piece in (PPOMin(), DoubleSided(), MiniRL(), DPPO())],
        ]

    @pytest.mark.parametrize(
        ("value", "message"),
        [
            ("lop", "`method` is 'lop', but must be one of so_grpo"),
            (3, "`method` is 3, but must be a name or a mapping"),
            ({"credits": "gigpo"}, "`method` has 'credits', but must be made of credit, keep"),
            ({"credit": "gigp"}, r"`method\.credit` is 'gigp', but must be one of group_mean"),
            ({"keep": [{"top_k": {"shar": 1}}]}, r"`method\.keep\.top_k` has 'shar', but takes share, reward"),
            ({"keep": [{"top_k": {"share": 2}}]}, r"`share` is 2, but must be in \[0, 1\]"),
            (
                {"terms": {"clip_penalty": {"kl_estimator": "k1"}}},
                "`kl_estimator` is 'k1', but must be .*'k2'.*'unbiased'",
            ),
            ('{"credit": ', "must be a name or JSON"),
        ],
    )
    def test_what_is_wrong_is_named(self, value: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            method_from(value)

    def test_a_piece_must_be_a_function(self) -> None:
        with pytest.raises(ValueError, match=r"`keep` is .*, but must be a tuple"):
            Method(keep=TopK())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="`surrogate` has 3, but must be a function"):
            Method(surrogate=3)  # type: ignore[arg-type]
