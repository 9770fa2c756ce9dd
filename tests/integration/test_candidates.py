"""Training on what was chosen among candidates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from examples.quickstart import PROTOCOL
from examples.selection_weight import selection_ratio, weighted
from trl import GRPOTrainer

from sorl_trl import Method, SearchRollout, SOGRPOTrainer
from sorl_trl.methods.method import group_mean_advantages
from sorl_trl.rollout import BestOfTrajectories, BestOfTurns
from sorl_trl.search import NoSearch
from sorl_trl.types import Action, ActionKind, StopReason, Trajectory, Turn
from tests.agents import LIMITS, NO_WAIT, build_agent, questions, search_index, turns_reward

pytestmark = pytest.mark.trains

ROWS = 16
"""Trajectories of a rollout: four prompts, in groups of four."""


class Counted:
    """Scores turns by their length, and counts them."""

    def __init__(self) -> None:
        self.examples: list[Any] = []

    def __call__(self, example: Any, turn: Turn, reply: Any) -> float:
        self.examples.append(example)
        return float(len(turn.token_ids))


def build(folder: Path, candidates: Any, trainer_class: Any = SOGRPOTrainer, **options: Any) -> tuple[Any, list[int]]:
    """A trainer, and how many trajectories its reward function has been given at each call."""
    rewarded: list[int] = []

    def reward(trajectory: Any, **_: Any) -> list[float]:
        rewarded.append(len(trajectory))
        return turns_reward(trajectory)

    rollout = SearchRollout(search_index(folder), PROTOCOL, LIMITS, NO_WAIT, candidates=candidates)
    given = {"reward_funcs": [reward], "max_steps": 2, "eval_dataset": questions(4), **options}
    torch.manual_seed(0)
    return build_agent(folder, trainer_class=trainer_class, rollout_func=rollout, **given), rewarded


@pytest.mark.parametrize("trainer_class", [SOGRPOTrainer, GRPOTrainer])
@pytest.mark.parametrize("how", [BestOfTurns, BestOfTrajectories])
def test_training_chooses_and_evaluation_does_not(tmp_path: Path, how: Any, trainer_class: Any) -> None:
    """Rewards, and so every baseline, are those of what was chosen; what was discarded is counted."""
    score = Counted()
    trainer, rewarded = build(tmp_path, how(3, score), trainer_class)
    trainer.train()
    (log,) = [each for each in trainer.state.log_history if "rollout/tokens_sampled" in each]
    assert rewarded == [ROWS]
    assert log["rollout/tokens_sampled"] > 1.5 * log["rollout/turns_per_trajectory"] * log["rollout/tokens_per_turn"]
    assert log["rollout/environment_steps"] >= log["rollout/searches_per_trajectory"]
    asked = len(score.examples)
    assert asked > 3 * ROWS
    assert all(("golden_answers" in each) == (trainer_class is SOGRPOTrainer) for each in score.examples)
    evaluated = trainer.evaluate()
    assert len(score.examples) == asked and len(rewarded) > 1
    assert "eval_rollout/turns_per_trajectory" in evaluated and "eval_rollout/tokens_sampled" not in evaluated


def test_anything_else_is_refused() -> None:
    with pytest.raises(TypeError, match="candidates is 4, but must be `BestOfTurns`, `BestOfTrajectories` or None"):
        SearchRollout(NoSearch(), candidates=4)  # type: ignore[arg-type]


def test_rollouts_ahead_choose_as_well(tmp_path: Path) -> None:
    score = Counted()
    trainer, rewarded = build(tmp_path, BestOfTurns(2, score, width=2), async_staleness=1, max_steps=4)
    trainer.model.eval()  # as a model is loaded
    trainer.train()
    assert {*rewarded} == {ROWS} and len(score.examples) > 4 * ROWS
    assert sum("rollout/tokens_sampled" in each for each in trainer.state.log_history) == len(rewarded)


def test_what_was_chosen_can_be_weighted_as_if_it_had_not_been(tmp_path: Path) -> None:
    """With two candidates, q/π = F + F⁻: 1 + 1/2 for the better one, and 1 for one of two that are equal."""
    turns = [Turn((1,), "", Action(ActionKind.INVALID), scores=scores) for scores in ((2.0, 1.0), (1.0, 1.0), ())]
    chosen, plain = (Trajectory((1,), tuple(some), StopReason.ANSWERED) for some in (turns[:2], turns[2:]))
    down = Trajectory((1,), tuple(turns), StopReason.SEARCH_UNAVAILABLE)
    assert selection_ratio([chosen, plain, down]) == [pytest.approx(2 / 3), 1.0, None]
    found: list[Any] = []

    def credit(rollout: Any) -> Any:
        found.append((rollout, weighted(rollout)))
        return found[-1][1]

    options: dict[str, Any] = {"reward_funcs": [turns_reward, selection_ratio], "reward_weights": [1.0, 0.0]}
    trainer, _ = build(tmp_path, BestOfTurns(3, Counted()), method=Method(credit=credit), **options)
    trainer.train()
    ((rollout, advantages),) = found
    ratios = rollout.totals("selection_ratio")
    assert ratios.min() < 1 and ratios.max() <= 1
    torch.testing.assert_close(advantages, group_mean_advantages(rollout) * ratios.unsqueeze(1))
