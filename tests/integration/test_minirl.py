"""`loss_type="minirl"` in the trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_trl import SOGRPOConfig, SOGRPOTrainer, SOPPOConfig
from sorl_trl.trainers.checks.options import idle_options
from tests.effects import TRAINERS, build_trainer, effect
from tests.losses import gradient, off_policy_batch, token_logps
from tests.training import settings, train

MINIRL = {"loss_type": "minirl", "epsilon": 0.2, "epsilon_high": 0.27, "scale_rewards": "none"}
OFF_POLICY = {"clip_normalization": "none", "num_iterations": 2}
LEVELS = ["token", "turn", "sequence"]


def reference_loss(trainer: Any, batch: dict[str, Any], mismatch: Tensor) -> Tensor:
    """-Σ M min(w, C) A log π, token by token, over trajectories and `max_completion_length`: as the paper has it."""
    logps, level = token_logps(trainer, batch), trainer.args.importance_sampling_level
    log_ratio = (logps - batch["old_per_token_logps"]).detach()
    total = torch.zeros((), dtype=torch.float64)
    for i, turn_ids in enumerate(batch["turn_ids"]):
        kept = turn_ids >= 0
        for t in torch.nonzero(kept).flatten().tolist():
            alone = torch.arange(len(turn_ids)) == t
            unit = {"token": alone, "turn": turn_ids == turn_ids[t], "sequence": kept}[level]
            ratio, advantage = float(log_ratio[i][unit].mean().exp()), float(batch["advantages"][i])
            if (advantage > 0 and ratio > 1.27) or (advantage < 0 and ratio < 0.8):
                continue
            weight = min(ratio * float(mismatch[i, t]), trainer.args.minirl_cap)
            total = total - weight * advantage * logps[i, t]
    return total / (len(logps) * trainer.args.max_completion_length)


def weights_of(trainer: Any, batch: dict[str, Any], mismatch: Tensor) -> list[float]:
    """Of each model token, before the cap."""
    logps, level = token_logps(trainer, batch).detach(), trainer.args.importance_sampling_level
    log_ratio, found = logps - batch["old_per_token_logps"], []
    for i, turn_ids in enumerate(batch["turn_ids"]):
        for t in torch.nonzero(turn_ids >= 0).flatten().tolist():
            unit = {"token": torch.arange(len(turn_ids)) == t, "turn": turn_ids == turn_ids[t]}.get(
                level, turn_ids >= 0
            )
            found.append(float(log_ratio[i][unit].mean().exp() * mismatch[i, t]))
    return found


@pytest.mark.parametrize("engine", [False, True], ids=["", "vllm"])
@pytest.mark.parametrize("level", LEVELS)
def test_the_gradient_is_that_of_the_formula(tmp_path: Path, tokenizer: Any, level: str, engine: bool) -> None:
    fields = {"importance_sampling_level": level, "clip_range_scaling": "none", "minirl_cap": 1.1}
    trainer, batch = off_policy_batch(tmp_path, tokenizer, **MINIRL, **OFF_POLICY, **fields)
    mismatch = torch.ones(batch["turn_ids"].shape)
    if engine:
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
        noise = 0.3 * torch.randn(mismatch.shape, generator=torch.Generator().manual_seed(2))
        noise[0, 0] = float("nan")  # the engine could not say
        batch["sampling_per_token_logps"] = batch["old_per_token_logps"] - noise
        batch["importance_sampling_ratio"] = torch.full((8, 1), 100.0)  # TRL's, which is not to multiply in
        mismatch = noise.nan_to_num(0.0).exp()
    ours = trainer._compute_loss(trainer.model, batch)
    expected = gradient(reference_loss(trainer, batch, mismatch), trainer)
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(gradient(ours, trainer), expected, rtol=0, atol=1e-6)
    logged = trainer._metrics["train"]
    dropped = logged["clip_ratio/region_mean"][-1]
    assert 0 < dropped < 1
    weights = weights_of(trainer, batch, mismatch)
    capped = sum(weight > 1.1 for weight in weights) / len(weights)
    assert 0 < capped < 1
    assert logged["minirl/capped_weights"][-1] == pytest.approx(capped)


@pytest.mark.parametrize("split", [(4, 2), (2, 4)])
def test_gradients_do_not_depend_on_micro_batches(tmp_path: Path, tokenizer: Any, split: tuple[int, int]) -> None:
    weights = []
    for batch_size, accumulation in ((8, 1), split):
        arguments = settings(tmp_path, **MINIRL, optim="sgd", learning_rate=3.0, max_steps=2)
        arguments |= {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
        arguments |= {"steps_per_generation": accumulation, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
        trainer = train(SOGRPOTrainer, SOGRPOConfig, tokenizer, **arguments)
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_it_and_minirl_cap_change_training(tmp_path: Path, tokenizer: Any, trainer: str) -> None:
    cases: dict[str, dict[str, Any]] = {
        "dr_grpo": {"loss_type": "dr_grpo"},
        "minirl": {"loss_type": "minirl"},
        "capped": {"loss_type": "minirl", "minirl_cap": 0.9},
    }
    effects = [
        effect(build_trainer(tmp_path / name, tokenizer, trainer, importance_sampling_level="token", **case))
        for name, case in cases.items()
    ]
    assert len({str(each) for each in effects}) == 3


@pytest.mark.parametrize("config_class", [SOGRPOConfig, SOPPOConfig])
@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"delta": 4.0}, r"`delta` is 4\.0.*minirl"),
        ({"clip_normalization": "bias_norm"}, "bias_norm.*minirl"),
        ({"max_completion_length": None}, "`max_completion_length` is None.*minirl"),
        ({"double_sided_clip": True}, "`double_sided_clip` is True.*'minirl'"),
        ({"minirl_cap": 0.0}, r"`minirl_cap` is 0\.0"),
    ],
    ids=str,
)
def test_refused_by_name(tmp_path: Path, config_class: Any, others: dict[str, Any], message: str) -> None:
    plain = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "loss_type": "minirl"}
    config_class(**plain)
    with pytest.raises(ValueError, match=message):
        config_class(**plain, **others)


@pytest.mark.parametrize(
    "fields",
    [
        {"minirl_cap": 3.0},
        {"loss_type": "minirl", "use_vllm": True, "vllm_importance_sampling_clip_max": 2.0},
        {"loss_type": "minirl", "use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
    ],
    ids=str,
)
def test_what_has_no_effect_is_said(tmp_path: Path, fields: dict[str, Any]) -> None:
    config = SOGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **fields)
    assert [problem.option for problem in idle_options(config)] == [[*fields][-1]]
