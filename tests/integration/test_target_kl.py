"""Real runs with a learning rate that is too high, held back by `target_kl`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sorl_trl import SOGRPOConfig, SOGRPOTrainer
from sorl_trl.methods import SETTINGS, MicroBatch
from tests.collapses import build, logged
from tests.policies import build_policy
from tests.training import settings, train

TARGET = 0.02
HOT = 0.3
UPDATES = 8
"""Optimizer steps of a rollout."""
STEPS = 5 * UPDATES


def hot(folder: Path, trainer_class: Any = SOGRPOTrainer, **overrides: Any) -> Any:
    fields = {"learning_rate": HOT, "num_iterations": UPDATES, "max_steps": STEPS, "save_strategy": "no"}
    fields |= {"target_kl": TARGET, "callbacks": [], "seed": 42, **SETTINGS["sequence"], "method": "sequence"}
    return build(folder, trainer_class, **{**fields, **overrides})


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = hot(tmp_path_factory.mktemp("held"))
    trainer.train()
    return trainer


def test_the_factor_falls_and_holds_the_kl(tmp_path: Path, held: Any) -> None:
    free = hot(tmp_path, target_kl=0.0)
    free.train()
    assert logged(free, "lr_factor") == {}
    factors, after_the_first_rollout = logged(held, "lr_factor"), range(UPDATES + 1, STEPS + 1)
    assert factors[1] == 1.0
    assert max(factors[step] for step in after_the_first_rollout) < 0.2
    ours, theirs = (
        sum(kl for step, kl in logged(trainer, "kl_to_old").items() if step in after_the_first_rollout)
        for trainer in (held, free)
    )
    assert 2 * ours < theirs  # seeds that were tried: from a third to a ninetieth


def test_the_factor_is_that_of_the_update_whose_kl_is_seen(held: Any) -> None:
    """Also of the learning rate that transformers logs for the same update."""
    factors, kls, rates = (logged(held, name) for name in ("lr_factor", "kl_to_old", "learning_rate"))
    for step in range(2, STEPS + 1):
        change = factors[step] / factors[step - 1]
        if kls[step] > 2 * TARGET:
            assert change == pytest.approx(1 / 1.5) or factors[step] == 0.01, step
        assert rates[step] == pytest.approx(HOT * factors[step]), step
        assert change == 1.0 or step % UPDATES != 1, "the first update on a rollout says nothing"


class Rounds(SOGRPOTrainer):
    """Its old log-probabilities are those of another kernel or batch shape."""

    def _own_term(self, batch: MicroBatch, scores: Any) -> tuple[float, dict[str, Any]]:
        object.__setattr__(batch, "log_ratio", batch.log_ratio + 1e-3)
        return 0.0, {}


def test_rounding_in_the_first_update_says_nothing(tmp_path: Path) -> None:
    trainer = hot(tmp_path, Rounds, max_steps=2 * UPDATES + 1)
    trainer.train()
    factors = logged(trainer, "lr_factor")
    for first in (UPDATES + 1, 2 * UPDATES + 1):
        assert 0 < logged(trainer, "kl_to_old")[first] < 1e-5
        assert factors[first] == factors[first - 1] < 1


class Norm(nn.BatchNorm1d):
    """Its training mode depends on which trajectories share a micro-batch, which TRL shuffles."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize(("noise", "said"), [(None, 0), ("batch norm", 1), ("dropout", 1)])
def test_noise_before_an_update_is_said_once(
    noise: str | None, said: int, tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    policy = build_policy()
    with torch.no_grad():
        policy.lm_head.weight.mul_(30)
    if noise == "batch norm":
        policy.model.norm = Norm(policy.config.hidden_size)
    for layer in policy.model.layers:
        layer.self_attn.attention_dropout = 0.5
    options = {"disable_dropout": noise != "dropout", "max_steps": 9, "learning_rate": 1e-3}
    trainer = train(SOGRPOTrainer, SOGRPOConfig, tokenizer, model=policy, **settings(tmp_path, **options))
    kls = logged(trainer, "kl_to_old")
    assert (kls[1] > 1e-3, kls[5] > 1e-3) == (bool(said), bool(said))  # of four updates each
    assert sum("before any update on a rollout" in record.getMessage() for record in caplog.records) == said
