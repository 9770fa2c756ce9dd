"""The private bodies this package rests on, read in trl 1.16.0 and transformers 5.23.

A change in one of them fails here first: read the new body, adapt the override, and update the digest. Comment lines
and indentation do not count.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import trl
from transformers import Trainer
from transformers.integrations.deepspeed import deepspeed_load_checkpoint
from transformers.utils import chat_template_utils
from trl import GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.models import utils as model_utils
from trl.trainer import utils as trainer_utils
from trl.trainer.callbacks import SyncRefModelCallback

from sorl_trl.trainers.base_trainer import TurnLevelTrainer
from sorl_trl.trainers.critic.trainer import CriticTrainer
from sorl_trl.trainers.so_grpo_trainer import SOGRPOTrainer
from sorl_trl.trainers.so_ppo_trainer import _IMAGE_INPUTS, SOPPOTrainer

OVERRIDDEN = {
    "_tool_call_loop": "tools report an engine that is down; hits are logged",
    "_get_tool_suffix_ids": "what tools return is sanitized",
    "_generate": "turn ids of the completions, from recorded spans or the mask; what `reset` adds is sanitized",
    "_generate_and_score_completions": "turn rewards are recorded; turn_ids and turn advantages join the batch",
    "_get_per_token_logps_and_entropies": "the seam: turn ratios in place of token ratios; the critic's values",
    "_compute_loss": "weights of the turn mean, clipping-triggered normalization, value loss, metrics",
    "training_step": "division by the norm of the clipping bias",
    "_prepare_inputs": "rollouts wait for later ones where staleness is asked for",
    "_get_train_sampler": "the order of prompts follows the epoch, also in a resumed run",
    "_run_epoch": "the sampler is told the epoch",
    "train": "whether all machines see the checkpoints",
    "_save_checkpoint": "the unfinished generation cycle",
    "_prepare_for_training": "the unfinished generation cycle of the checkpoint from which a run goes on",
    "create_optimizer": "the critic's learning rate",
    "create_scheduler": "the critic's warm-up",
    "save_model": "the critic is whole when it is gathered",
    "_save": "the policy without its critic, and `critic/` beside it",
    "_load_from_checkpoint": "the policy without its critic, and the critic from `critic/`",
    "_load_best_model": "as `_load_from_checkpoint`",
    "_push_from_checkpoint": "the critic's folder is pushed too",
    "_load_optimizer_and_scheduler": "the check that a checkpoint has a critic that fits",
}
"""Method of GRPOTrainer, or of transformers' Trainer under it -> what the override adds."""

RELIED_ON: dict[str, Callable[..., Any]] = {
    "Trainer._load_scaler": Trainer._load_scaler,
    "Trainer.log": Trainer.log,
    "integrations.deepspeed_load_checkpoint": deepspeed_load_checkpoint,
    "chat_template_utils._plain_template_data": chat_template_utils._plain_template_data,
    "GRPOTrainer._calculate_rewards": GRPOTrainer._calculate_rewards,
    "GRPOTrainer._tokenize_prompts": GRPOTrainer._tokenize_prompts,
    "GRPOTrainer._log_metric": GRPOTrainer._log_metric,
    "SyncRefModelCallback.on_step_end": SyncRefModelCallback.on_step_end,
    "VLLMGeneration._iter_named_params": VLLMGeneration._iter_named_params,
    "VLLMGeneration.generate": VLLMGeneration.generate,
    "VLLMGeneration.sync_weights": VLLMGeneration.sync_weights,
    "VLLMClient.generate": VLLMClient.generate,
    "trainer.utils.add_fused_lm_head": trainer_utils.add_fused_lm_head,
    "models.utils._unwrap_model_for_generation": inspect.unwrap(model_utils._unwrap_model_for_generation),
    "trainer.utils.shuffle_sequence_dict": trainer_utils.shuffle_sequence_dict,
    "trainer.utils.split_tensor_dict": trainer_utils.split_tensor_dict,
}

DIGESTS = {
    "Trainer._load_scaler": "e3ecbc3ed0631c4a",
    "GRPOTrainer._prepare_for_training": "b717b8036ed32589",
    "Trainer.log": "d8cf0494ca100723",
    "integrations.deepspeed_load_checkpoint": "691d232d3bf7f3b6",
    "chat_template_utils._plain_template_data": "5f79741118eca647",
    "GRPOTrainer.train": "1141b5be39e0a2df",
    "GRPOTrainer._tool_call_loop": "1bbe47a3572bfa06",
    "GRPOTrainer._get_tool_suffix_ids": "fc1e83193cd69621",
    "GRPOTrainer._generate": "428bb9b5cd77ca6a",
    "GRPOTrainer._calculate_rewards": "8ffa0c7ca9307c40",
    "GRPOTrainer._generate_and_score_completions": "8ad618f3882bc520",
    "GRPOTrainer._get_per_token_logps_and_entropies": "ddcb878f6df4bae5",
    "GRPOTrainer._compute_loss": "765e782ef258696a",
    "GRPOTrainer.training_step": "ba3a469495fc4a59",
    "GRPOTrainer._prepare_inputs": "d8617f874014c408",
    "GRPOTrainer._tokenize_prompts": "c5df2fec534b862d",
    "GRPOTrainer._log_metric": "5798568dad22c147",
    "models.utils._unwrap_model_for_generation": "cc0d00b33d4ff870",
    "GRPOTrainer.create_optimizer": "70c8b7ca63b3ec7b",
    "GRPOTrainer.create_scheduler": "1bf9bfc4bbf10f5e",
    "GRPOTrainer.save_model": "1dc86d91156ccd87",
    "GRPOTrainer._save": "1e61c2eab808cb76",
    "GRPOTrainer._load_from_checkpoint": "dfb67e921139431f",
    "GRPOTrainer._load_optimizer_and_scheduler": "108fd4e5bf0dd4c8",
    "SyncRefModelCallback.on_step_end": "4f140e192223a97b",
    "VLLMGeneration._iter_named_params": "519043b4d96696ca",
    "VLLMGeneration.generate": "48a5f77c578cacf4",
    "VLLMGeneration.sync_weights": "34c6c4623d6fedcb",
    "VLLMClient.generate": "41f5d92807a69565",
    "trainer.utils.add_fused_lm_head": "5f4aa2119cf10d11",
    "GRPOTrainer._get_train_sampler": "77de8ae531b5b0c4",
    "GRPOTrainer._run_epoch": "a0fca088bae61fb6",
    "GRPOTrainer._save_checkpoint": "6f5313d411006bd8",
    "GRPOTrainer._load_best_model": "eff953ce885755e3",
    "GRPOTrainer._push_from_checkpoint": "cae99e324ff62d35",
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
    ours = {
        *vars(TurnLevelTrainer),
        *vars(SOGRPOTrainer),
        *vars(CriticTrainer),
        *vars(SOPPOTrainer),
    }
    overridden = {name for name in ours if callable(getattr(GRPOTrainer, name, None)) and name != "__init__"}
    assert overridden == set(OVERRIDDEN)


def test_image_inputs_are_those_of_trls_loss() -> None:
    """Old values come from a pass of ours, which must see the images that the loss will see."""
    in_the_loss = re.findall(r"\w=inputs\.get\(\"(\w+)\"\)", inspect.getsource(GRPOTrainer._compute_loss))
    assert set(in_the_loss) - {"importance_sampling_ratio"} == set(_IMAGE_INPUTS)  # vLLM's correction is no input
