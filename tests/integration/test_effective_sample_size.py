"""`effective_sample_size` as both trainers log it: of the sums over a step, whatever the micro-batches are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sorl_trl.ops import importance_ratio
from tests.effects import TRAINERS, build_trainer
from tests.losses import off_policy_batch, token_logps
from tests.training import settings, train


@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
def test_it_is_that_of_the_ratios_of_the_level(tmp_path: Path, tokenizer: Any, level: str) -> None:
    trainer, batch = off_policy_batch(tmp_path, tokenizer, num_iterations=2, importance_sampling_level=level)
    trainer._compute_loss(trainer.model, batch)
    log_ratio = token_logps(trainer, batch).detach() - batch["old_per_token_logps"]
    ratios = importance_ratio(log_ratio, batch["turn_ids"], level)[batch["turn_ids"] >= 0]
    expected = ratios.sum() ** 2 / (len(ratios) * ratios.square().sum())
    assert trainer._metrics["train"]["effective_sample_size"] == [pytest.approx(expected.item(), rel=1e-5)]
    assert expected < 0.98


@pytest.mark.parametrize("trainer_name", TRAINERS)
def test_it_does_not_depend_on_micro_batches_and_is_1_on_policy(
    tmp_path: Path, tokenizer: Any, trainer_name: str
) -> None:
    logged = []
    for batch_size, accumulation in ((8, 1), (2, 4)):
        trainer_class: Any = TRAINERS[trainer_name]
        arguments = settings(tmp_path, optim="sgd", learning_rate=3.0, max_steps=2, importance_sampling_level="token")
        arguments |= {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
        arguments |= {"steps_per_generation": accumulation, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
        arguments |= {"num_generations": 2, "num_iterations": 2, "target_kl": 0.0}
        trainer = train(trainer_class, trainer_class.config_class, tokenizer, **arguments)
        logged.append([log["effective_sample_size"] for log in trainer.state.log_history if "reward" in log or
                       "effective_sample_size" in log])  # fmt: skip
    assert logged[0] == pytest.approx(logged[1], abs=1e-5)
    assert logged[0][0] == pytest.approx(1.0, abs=1e-5)
    assert logged[0][1] < 0.999


def test_an_evaluation_logs_it_too(tmp_path: Path, tokenizer: Any) -> None:
    trainer = build_trainer(tmp_path, tokenizer, "SO-GRPO")
    trainer.model.eval()
    with torch.no_grad():
        batch = trainer._generate_and_score_completions([{"prompt": "w1 w2"}] * 4)
        trainer._compute_loss(trainer.model, batch)
    assert trainer._metrics["eval"]["effective_sample_size"] == [pytest.approx(1.0, abs=1e-5)]
