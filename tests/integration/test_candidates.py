"""The benchmark's candidates in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.candidates import CandidateTrainer, following

from sorl_trl.trainers.base_trainer import TurnLevelTrainer
from tests.collapses import build, logged

UPDATES = 6
"""Optimizer steps of a rollout."""
ROLLOUTS = 4
LIMIT = 0.02


class Watched(CandidateTrainer):
    """Keeps, of each update, whether the policy moved."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.moved: list[bool] = []
        self.before = self.weights()

    def weights(self) -> torch.Tensor:
        return torch.cat([each.detach().flatten().clone() for each in self.model.parameters()])

    def training_step(self, *args: Any) -> torch.Tensor:
        self.look()
        return super().training_step(*args)

    def look(self) -> None:
        now = self.weights()
        self.moved.append(not torch.equal(now, self.before))
        self.before = now


def train(folder: Path, **overrides: Any) -> Watched:
    fields = {"learning_rate": 0.1, "num_iterations": UPDATES, "max_steps": ROLLOUTS * UPDATES, "save_strategy": "no"}
    trainer: Watched = build(folder, Watched, callbacks=[], **{**fields, **overrides})
    trainer.train()
    trainer.look()
    del trainer.moved[0]  # before the first update
    return trainer


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_rollouts_updates_end_above_the_limit_and_the_next_rollout_begins_anew(
    tmp_path: Path, staleness: int
) -> None:
    trainer = train(tmp_path, stop_above=LIMIT, rollout_staleness=staleness, clip_normalization="none")
    kls = list(logged(trainer, "kl_to_old").values())
    expected = []
    for start in range(0, len(kls), UPDATES):
        of_rollout = kls[start : start + UPDATES]
        expected += [max(of_rollout[: place + 1]) <= LIMIT for place in range(UPDATES)]
    assert trainer.moved == expected
    assert not all(expected)
    assert expected[0]
    assert any(expected[2 * UPDATES :])


@pytest.fixture
def coefficients(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """λ in each update's loss."""
    found: list[float] = []
    own = TurnLevelTrainer._with_own_terms

    def recording(self: Any, loss: torch.Tensor, batch: Any) -> torch.Tensor:
        found.append(self.args.ctn_coef)
        return own(self, loss, batch)

    monkeypatch.setattr(TurnLevelTrainer, "_with_own_terms", recording)
    return found


def test_the_penalty_closes_as_the_kl_falls(tmp_path: Path, coefficients: list[float]) -> None:
    trainer = train(tmp_path, closes_below=LIMIT, ctn_coef=3.0)
    kls = logged(trainer, "kl_to_old").values()
    assert coefficients == pytest.approx([3 * max(0.0, 1 - LIMIT / max(kl, 1e-12)) for kl in kls], rel=1e-3)
    assert min(coefficients) == 0 < max(coefficients)
    assert trainer.args.ctn_coef == 3.0


def test_the_coefficient_follows_the_kl_but_for_first_updates(tmp_path: Path, coefficients: list[float]) -> None:
    trainer = train(tmp_path, coef_target=LIMIT, ctn_coef=3.0)
    expected = 3.0
    for place, kl in enumerate(logged(trainer, "kl_to_old").values()):
        expected = following(expected, kl, LIMIT) if place % UPDATES else expected
        assert coefficients[place] == pytest.approx(expected)
    assert expected != 3.0


def test_a_candidate_that_has_become_an_option_is_that_option(tmp_path: Path) -> None:
    masking, plain = (train(tmp_path / str(name), masks_units=name, max_steps=1) for name in (True, False))
    assert (masking.args.double_sided_clip, plain.args.double_sided_clip) == (True, False)
