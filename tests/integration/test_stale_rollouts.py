"""Each rollout is trained on a fixed number of rollouts late, with the log-probabilities of its own policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sorl_trl import SOGRPOTrainer, SOPPOTrainer
from tests.agents import build_agent

ONE_UPDATE = {"num_iterations": 1, "steps_per_generation": 1, "gradient_accumulation_steps": 1}
TWO_UPDATES = {"num_iterations": 2, "steps_per_generation": 1, "gradient_accumulation_steps": 1}


def build(folder: Path, trainer_class: Any = SOGRPOTrainer, **overrides: Any) -> Any:
    fields = {"per_device_train_batch_size": 4, "num_generations": 2, "max_steps": 6, "logging_steps": 1}
    return build_agent(folder, trainer_class=trainer_class, **{**fields, "learning_rate": 1e-2, **overrides})


def entries(trainer: Any, name: str) -> list[Any]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.parametrize("trainer_class", [SOGRPOTrainer, SOPPOTrainer])
def test_trajectories_are_as_old_as_asked(tmp_path: Path, trainer_class: Any) -> None:
    trainer = build(tmp_path, trainer_class, rollout_staleness=2, max_steps=16, **TWO_UPDATES)
    trainer.train()
    # Rollouts 0a 0b | 1a 1b | 2 | 3 | 4 … are collected at steps 0, 2, 4, …, and trained on in that order.
    assert entries(trainer, "off_policy_age") == [0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 4, 5, 4, 5, 4, 5]


def test_without_staleness_nothing_waits(tmp_path: Path) -> None:
    trainer = build(tmp_path, **TWO_UPDATES)
    trainer.train()
    assert entries(trainer, "off_policy_age") == [0, 1, 0, 1, 0, 1]
    assert not trainer._cycle.waiting


def test_every_rollout_is_trained_on_in_order(tmp_path: Path) -> None:
    trainer = build(tmp_path, rollout_staleness=1, **TWO_UPDATES)
    generated, trained = [], []
    score, loss = trainer._generate_and_score_completions, trainer._compute_loss

    def generate(inputs: Any) -> Any:
        output = score(inputs)
        generated.append(output["completion_ids"].sum().item())
        return output

    def compute(model: Any, inputs: Any) -> Any:
        trained.append(inputs["completion_ids"].sum().item())
        return loss(model, inputs)

    trainer._generate_and_score_completions, trainer._compute_loss = generate, compute
    trainer.train()
    assert len(generated) == 4  # two at first
    assert trained == [rollout for rollout in generated[:3] for _ in range(2)]


def test_old_logps_are_of_the_sampling_policy_even_with_one_update_per_rollout(tmp_path: Path) -> None:
    """TRL would take the log-probabilities of the policy that is being updated: every ratio 1, nothing corrected."""
    trainer = build(tmp_path, rollout_staleness=1, **ONE_UPDATE)
    trainer.train()
    kl = entries(trainer, "kl_to_old")
    assert kl[0] == pytest.approx(0.0, abs=1e-7)
    assert min(kl[1:]) > 1e-4


def test_discarded_rollouts_are_collected_anew(tmp_path: Path) -> None:
    trainer = build(tmp_path, rollout_staleness=2, **ONE_UPDATE)
    trainer.train()
    assert len(trainer._cycle.waiting) == 2
    trainer._cycle.discard()
    assert trainer._buffered_inputs is None
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train()
    inputs = trainer._prepare_inputs(batch)
    assert int(inputs["generated_at_step"]) == trainer.state.global_step
    assert len(trainer._cycle.waiting) == 1


def test_evaluation_does_not_wait(tmp_path: Path) -> None:
    trainer = build(tmp_path, rollout_staleness=2, **ONE_UPDATE)
    trainer.train()
    waiting = [batch[0]["completion_ids"] for batch in trainer._cycle.waiting]
    trainer.model.eval()
    trainer._prepare_inputs([{"prompt": "where rome", "golden_answers": ["rome"]}] * 2)
    assert all(torch.equal(a, b[0]["completion_ids"]) for a, b in zip(waiting, trainer._cycle.waiting, strict=True))
