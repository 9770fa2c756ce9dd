"""How often a step asks a GPU for numbers, and so waits for it: what ours adds to TRL's, counted on a CPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import pytest
from trl import GRPOConfig, GRPOTrainer

from sorl_trl import SeeUPOConfig, SeeUPOTrainer, SOGRPOConfig, SOGRPOTrainer, SOPPOConfig, SOPPOTrainer
from tests.device_reads import device_reads
from tests.training import settings, train

MICRO_BATCHES = 4
OPTIMIZER_STEPS = 3
OF_THE_HOST = {
    *("micro_batch.py:generation_step_of", "micro_batch.py:most_turns", "micro_batch.py:row_scale"),
    "backward.py:observe",
}
"""Readers of tensors that stay on the host (`micro_batch.ON_HOST`): nothing waits for them."""


def counting(trainer_class: Any) -> Any:
    class Counting(trainer_class):  # type: ignore[misc]
        losses: ClassVar[Counter[str]] = Counter()
        rollouts: ClassVar[Counter[str]] = Counter()

        def _compute_loss(self, *args: Any) -> Any:
            with device_reads() as reads:
                loss = super()._compute_loss(*args)
            type(self).losses += reads
            return loss

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            with device_reads() as reads:
                batch = super()._generate_and_score_completions(inputs)
            type(self).rollouts += reads
            return batch

    return Counting


def counts(trainer_class: Any, config_class: Any, tokenizer: Any, folder: Path, **overrides: Any) -> Any:
    """A trainer after `OPTIMIZER_STEPS` steps of `MICRO_BATCHES` each on one rollout, with what it has read."""
    fields = {"gradient_accumulation_steps": MICRO_BATCHES, "num_iterations": OPTIMIZER_STEPS, **overrides}
    fields |= {"max_steps": OPTIMIZER_STEPS, "disable_dropout": True, "gradient_checkpointing": False}
    return train(counting(trainer_class), config_class, tokenizer, **settings(folder, **fields))


def of_device(reads: Counter[str]) -> int:
    return sum(count for reader, count in reads.items() if reader not in OF_THE_HOST)


@pytest.mark.parametrize(
    ("trainer_class", "config_class", "extra"),
    [
        (SOGRPOTrainer, SOGRPOConfig, {}),
        (SOGRPOTrainer, SOGRPOConfig, {"target_kl": 0.0}),
        (SOGRPOTrainer, SOGRPOConfig, {"turn_ratio": "arithmetic", "ctn_gate": "turn"}),
        (SOPPOTrainer, SOPPOConfig, {}),
        (SeeUPOTrainer, SeeUPOConfig, {"target_kl": 0.0}),
    ],
    ids=str,
)
def test_a_loss_waits_no_oftener_than_trls_but_for_two_waits_per_step(
    tokenizer: Any, tmp_path: Path, trainer_class: Any, config_class: Any, extra: dict[str, Any]
) -> None:
    """One for all metrics of all micro-batches of the step, and one for the KL that the learning rate follows."""
    trl = counts(GRPOTrainer, GRPOConfig, tokenizer, tmp_path / "trl", loss_type="grpo")
    ours = counts(trainer_class, config_class, tokenizer, tmp_path / "ours", **extra)
    follows_kl = extra.get("target_kl") != 0.0
    allowed = of_device(trl.losses) + OPTIMIZER_STEPS + (OPTIMIZER_STEPS - 1) * follows_kl
    assert of_device(ours.losses) == allowed, (ours.losses, trl.losses)


@pytest.mark.parametrize(
    ("trainer_class", "config_class"),
    [(SOGRPOTrainer, SOGRPOConfig), (SOPPOTrainer, SOPPOConfig), (SeeUPOTrainer, SeeUPOConfig)],
)
def test_ours_reads_as_often_for_many_rows_as_for_few(
    tokenizer: Any, tmp_path: Path, trainer_class: Any, config_class: Any
) -> None:
    """TRL itself asks row by row in a rollout."""
    few, many = (
        counts(trainer_class, config_class, tokenizer, tmp_path / str(size), per_device_train_batch_size=size).rollouts
        for size in (4, 8)
    )
    by_trl = Counter({reader: many[reader] - few[reader] for reader in many if many[reader] != few[reader]})
    assert {reader.split(":")[0] for reader in by_trl} <= {"grpo_trainer.py", "utils.py"}, by_trl
