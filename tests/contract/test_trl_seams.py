"""The private bodies this package rests on, read in trl 1.16.0 and transformers 5.23.

A change in one of them fails here first: read the new body, adapt the override, and update the digest. Comment lines
and indentation do not count.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import trl
from transformers import Trainer
from trl import GRPOTrainer
from trl.models import utils as model_utils
from trl.trainer import utils as trainer_utils

from sorl_trl.trainers.base_trainer import TurnLevelTrainer
from sorl_trl.trainers.so_grpo_trainer import SOGRPOTrainer

OVERRIDDEN = {
    "_generate": "turn ids of the completions, from recorded spans or the mask",
    "_calculate_rewards": "turn rewards; trajectories without a turn are not scored",
    "_generate_and_score_completions": "turn_ids and turn advantages join the batch",
    "_get_per_token_logps_and_entropies": "the seam: turn ratios in place of token ratios",
    "_compute_loss": "weights of the turn mean, clipping-triggered normalization, metrics",
    "training_step": "division by the norm of the clipping bias",
}
"""Method of GRPOTrainer -> what the override adds."""

RELIED_ON: dict[str, Callable[..., Any]] = {
    "GRPOTrainer._prepare_inputs": GRPOTrainer._prepare_inputs,
    "GRPOTrainer._tokenize_prompts": GRPOTrainer._tokenize_prompts,
    "GRPOTrainer._log_metric": GRPOTrainer._log_metric,
    "Trainer._run_epoch": Trainer._run_epoch,
    "models.utils._unwrap_model_for_generation": inspect.unwrap(model_utils._unwrap_model_for_generation),
    "trainer.utils.shuffle_sequence_dict": trainer_utils.shuffle_sequence_dict,
    "trainer.utils.split_tensor_dict": trainer_utils.split_tensor_dict,
}

DIGESTS = {
    "GRPOTrainer._generate": "428bb9b5cd77ca6a",
    "GRPOTrainer._calculate_rewards": "8ffa0c7ca9307c40",
    "GRPOTrainer._generate_and_score_completions": "8ad618f3882bc520",
    "GRPOTrainer._get_per_token_logps_and_entropies": "ddcb878f6df4bae5",
    "GRPOTrainer._compute_loss": "765e782ef258696a",
    "GRPOTrainer.training_step": "ba3a469495fc4a59",
    "GRPOTrainer._prepare_inputs": "d8617f874014c408",
    "GRPOTrainer._tokenize_prompts": "c5df2fec534b862d",
    "GRPOTrainer._log_metric": "5798568dad22c147",
    "Trainer._run_epoch": "a0fca088bae61fb6",
    "models.utils._unwrap_model_for_generation": "cc0d00b33d4ff870",
    "trainer.utils.shuffle_sequence_dict": "88edff67896fac4f",
    "trainer.utils.split_tensor_dict": "99bca9adc3143c7e",
}


def digest(function: Callable[..., Any]) -> str:
    lines = [line.strip() for line in inspect.getsource(inspect.unwrap(function)).splitlines()]
    code = "\n".join(line for line in lines if line and not line.startswith("#"))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


BODIES = {f"GRPOTrainer.{name}": getattr(GRPOTrainer, name) for name in OVERRIDDEN} | RELIED_ON


def test_the_version_is_the_one_that_was_read() -> None:
    assert trl.__version__.startswith("1.16."), "read docs/architecture.md before moving to another minor version"


@pytest.mark.parametrize("name", BODIES)
def test_body_is_the_one_that_was_read(name: str) -> None:
    assert digest(BODIES[name]) == DIGESTS[name], f"{name} has changed"


def test_overrides_are_those_listed() -> None:
    """No private method of TRL's is overridden without being pinned here."""
    ours = {*vars(TurnLevelTrainer), *vars(SOGRPOTrainer)}
    overridden = {name for name in ours if callable(getattr(GRPOTrainer, name, None)) and name != "__init__"}
    assert overridden == set(OVERRIDDEN)
