"""Where every switch of other methods is off, the loss is bit for bit that of a trainer which has none of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from sorl_trl import SOGRPOConfig, SOGRPOTrainer, SOPPOTrainer
from sorl_trl.trainers.options.credit import CreditOptions
from sorl_trl.trainers.options.groups import GroupOptions
from sorl_trl.trainers.options.loss import LossOptions
from tests.losses import gradient
from tests.training import saved_policy, settings
from tests.trajectories import FixedRollout, parity_reward, prompts

pytestmark = pytest.mark.trains

OFF: dict[str, Any] = {
    "group_baseline": "mean",
    "group_filter": "none",
    "group_filter_share": 1.0,
    "group_filter_reward": None,
    "group_refill": 0,
    "mask_void_trajectories": False,
    "double_sided_clip": False,
    "llds_coef": 0.0,
    "minirl_cap": 5.0,
    "vllm_importance_sampling_mode": "sequence_mask",
    "mismatch_veto": None,
    "turn_reward_normalization": "together",
    "information_gain_coef": 0.0,
    "information_gain_column": "golden_answers",
    "information_gain_prefix": None,
    "step_advantage_coef": 0.0,
}
"""Switch -> its value where it is off."""
TRAINERS = "sorl_trl.trainers."
PARTS = (
    *("turns.selection.drop", "turns.selection.group_spread", "turns.engine_mismatch.drop", "turns.refill.merge"),
    *("base_trainer.correct_mismatch", "base_trainer.mismatch_log_ratio", "base_trainer.InformationGain"),
    *("base_trainer.count_good_tokens", "base_trainer.llds", "turns.refill.GroupRefill.fill"),
    *("loss.so_loss.double_sided_surrogate", "loss.so_loss.minirl_surrogate", "loss.metric_log.minirl_weights"),
    *("so_grpo_trainer.leave_one_out_advantages", "so_grpo_trainer.separate_turn_advantages"),
    *("so_grpo_trainer.state_advantages", "so_grpo_trainer.state_keys"),
)
"""What does the work of the switches, where it is called."""
TRL_LOSS_TYPES = ("grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo")


def test_every_switch_is_named_and_off_by_default() -> None:
    fields = [each for options in (GroupOptions, LossOptions, CreditOptions) for each in dataclasses.fields(options)]
    assert {each.name: each.default for each in fields} == OFF


def loss_of(folder: Path, tokenizer: Any, trainer_class: Any, config_class: Any, **options: Any) -> list[Tensor]:
    """Advantages, loss and gradient of a batch whose old and reference log-probabilities lie some way off."""
    config = config_class(**settings(folder, gradient_checkpointing=False, beta=0.1, **options))
    trainer = trainer_class(
        saved_policy(folder), parity_reward, config, prompts(), processing_class=tokenizer,
        rollout_func=FixedRollout(),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 2
    trainer.model.train()
    batch = trainer._generate_and_score_completions([dict(row) for row in prompts(4) for _ in range(4)])
    generator = torch.Generator().manual_seed(7)
    for key in ("old_per_token_logps", "ref_per_token_logps"):
        batch[key] = batch[key] + 0.6 * torch.randn(batch[key].shape, generator=generator)
    loss = trainer.compute_loss(trainer.model, batch)
    return [batch["advantages"], loss.detach(), gradient(loss, trainer)]


def assert_same_bits(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert theirs[-1].abs().max() > 1e-4
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("loss_type", TRL_LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_it_is_trls_loss(tmp_path: Path, tokenizer: Any, loss_type: str, level: str) -> None:
    options = {"loss_type": loss_type, "importance_sampling_level": level, "epsilon_high": 1.01}
    theirs = loss_of(tmp_path, tokenizer, GRPOTrainer, GRPOConfig, **options)
    ours = loss_of(tmp_path, tokenizer, SOGRPOTrainer, SOGRPOConfig, **options, target_kl=0.0, **OFF)
    assert_same_bits(ours, theirs)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gamma": 0.9},
        {"importance_sampling_level": "turn", "loss_type": "turn", "clip_normalization": "kl_penalty"},
        {"importance_sampling_level": "turn", "loss_type": "dapo", "turn_ratio": "arithmetic"},
        {"importance_sampling_level": "token", "loss_type": "vespo"},
    ],
    ids=str,
)
@pytest.mark.parametrize("trainer_class", [SOGRPOTrainer, SOPPOTrainer])
def test_it_is_the_loss_without_what_they_do(
    tmp_path: Path, tokenizer: Any, trainer_class: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a trainer that knows none of them by name, and has none of their parts."""
    options = {"num_generations": 4, **options}
    named = loss_of(tmp_path, tokenizer, trainer_class, trainer_class.config_class, **options, **OFF)

    def lacking(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a part of a switch that is off was called")

    for part in PARTS:
        monkeypatch.setattr(TRAINERS + part, lacking)
    assert_same_bits(named, loss_of(tmp_path, tokenizer, trainer_class, trainer_class.config_class, **options))
