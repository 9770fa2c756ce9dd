"""PPO's loss, policy and critic, against docs/internals/equations.md, written out as loops in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sorl_trl import SOPPOTrainer
from sorl_trl.trainers.optimizer_step import bias_normalizer
from tests.critics import BATCH_SIZE, critic_parameters, rollout_batch
from tests.losses import gradient, positions
from tests.ppo_losses import DISCOUNTED, LEVELS, assert_follows_the_formula, build, units_of, value_reference
from tests.trajectories import SeveralContexts

pytestmark = pytest.mark.trains

VARIANTS: dict[str, dict[str, Any]] = {
    "PPO": {
        "importance_sampling_level": "token",
        "advantage_level": "token",
        "method": {"terms": ()},
        "loss_type": "bnpo",
    },
    "Turn-PPO": {"advantage_level": "token", "method": {"terms": ()}, "loss_type": "grpo"},
    "Turn-PPO arithmetic": {"advantage_level": "token", "method": {"terms": ()}, "turn_ratio": "arithmetic"},
    "SO-PPO": {},
    "SO-PPO arithmetic": {"turn_ratio": "arithmetic"},
    "SO-PPO at token level": {"advantage_level": "token"},
    "SO-PPO with contexts": {"rollout_func": SeveralContexts()},
}


def off_policy_batch(tmp_path: Path, tokenizer: Any, **overrides: Any) -> tuple[SOPPOTrainer, dict[str, Any]]:
    """A batch whose old log-probabilities and values lie some way off, so that both losses clip.

    Unless told otherwise it has what SORL has, with geometric means: turn ratios, the mean over turns and the penalty.
    """
    trainer = build(tmp_path, tokenizer, **{"num_iterations": 2, **overrides})
    batch = rollout_batch(trainer)
    generator = torch.Generator().manual_seed(7)
    for key, scale in (("old_per_token_logps", 0.6), ("old_values", 0.3), ("returns", 0.5)):
        noise = scale * torch.randn(batch[key].shape, generator=generator)
        batch[key] = batch[key] + torch.where(batch["turn_ids"] >= 0, noise, 0.0)
    return trainer, batch


@pytest.mark.parametrize(
    ("variant", "clip_range"), [*((name, 0.2) for name in VARIANTS), ("PPO", None), ("SO-PPO", None)]
)
def test_loss_and_gradient_are_those_of_the_formula(
    tmp_path: Path, tokenizer: Any, variant: str, clip_range: float | None
) -> None:
    overrides = {**VARIANTS[variant], **DISCOUNTED, "value_clip_range": clip_range}
    trainer, batch = off_policy_batch(tmp_path, tokenizer, **overrides)
    assert_follows_the_formula(trainer, batch)
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    assert metrics["clip_fraction/turn"] > 0.1
    assert metrics["critic/value_loss"] == pytest.approx(value_reference(trainer, batch).item(), abs=1e-6)
    share = metrics["critic/value_clip_fraction"]
    assert 0.1 < share < 0.9 if clip_range else share == 0.0


@pytest.mark.parametrize("level", ["turn", "token"])
@pytest.mark.parametrize("loss_type", ["turn", "grpo", "dapo", "cispo", "vespo", "dr_grpo"])
def test_micro_batches_add_up(tmp_path: Path, tokenizer: Any, loss_type: str, level: str) -> None:
    """Micro-batches with different numbers of turns and tokens: a mean over each would weigh them alike."""
    ratios = "token" if loss_type in ("cispo", "vespo") else "turn"
    overrides = {"loss_type": loss_type, "epsilon_high": 5.0, "vf_coef": 3.0, **LEVELS[level]}
    overrides["importance_sampling_level"] = ratios
    trainer, batch = off_policy_batch(tmp_path, tokenizer, **overrides)
    whole = gradient(trainer._compute_loss(trainer.model, batch), trainer)
    units = [[unit for span in positions(row) for unit in units_of(span, trainer.args)] for row in batch["turn_ids"]]
    pooled = torch.tensor([len(row) for row in units])
    assert int(batch["value_units"]) == int(pooled.sum())
    order = pooled.argsort()
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 4
    parts = torch.zeros_like(whole)
    sizes = set()
    for rows in order.split(BATCH_SIZE // 4):
        part = {key: value[rows] if value.dim() else value for key, value in batch.items()}
        sizes.add(int(pooled[rows].sum()))
        parts += gradient(trainer._compute_loss(trainer.model, part), trainer)
    assert len(sizes) > 1
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", ["PPO", "SO-PPO", "SO-PPO with contexts"])
def test_values_of_observations_and_padding_never_matter(
    tmp_path: Path, tokenizer: Any, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old values, returns and, in the end, the critic's own values there: all NaN."""
    trainer, batch = off_policy_batch(tmp_path, tokenizer, **VARIANTS[variant])
    clean = trainer._compute_loss(trainer.model, batch)
    expected = gradient(clean, trainer)
    off = batch["turn_ids"] < 0
    dirty = {**batch, **{key: torch.where(off, math.nan, batch[key]) for key in ("old_values", "returns")}}
    losses = [trainer._compute_loss(trainer.model, dirty)]

    def values_off(*args: Any, **options: Any) -> Any:
        found = plain(*args, **options)
        return replace(found, values=torch.where(off, math.nan, found.values))

    plain = trainer._forward
    monkeypatch.setattr(trainer, "_forward", values_off)
    losses.append(trainer._compute_loss(trainer.model, batch))
    for loss in losses:
        assert loss.item() == clean.item()
        assert torch.equal(gradient(loss, trainer), expected)


def test_bias_norm_leaves_the_critics_gradient_alone(tmp_path: Path, tokenizer: Any) -> None:
    """ST-PPO: ∇J is divided by the norm of the clipping bias; the value loss has no such bias."""
    overrides = {**VARIANTS["Turn-PPO"], "bias_norm": True}
    trainer, batch = off_policy_batch(tmp_path, tokenizer, **overrides)
    batch["advantages"] = 60.0 * batch["advantages"]
    trainer.create_optimizer()
    plain = gradient(trainer._compute_loss(trainer.model, batch), trainer)
    trainer.model.zero_grad()
    trainer._bias_normalizer = bias_normalizer(trainer._host)  # as a run begins
    trainer._prepare_inputs = lambda inputs: inputs
    trainer.accelerator.gradient_state._set_sync_gradients(True)
    trainer.training_step(trainer.model, batch, None)
    trainer.args.max_grad_norm = 1e9
    trainer._clip_grad_norm(trainer.model)
    norm = trainer._metrics["train"]["clipping_bias_norm"][-1]
    assert norm > 1
    own = sum(p.numel() for p in critic_parameters(trainer.model).values())
    ours = torch.cat([p.grad.flatten() for p in trainer.model.parameters()]).double()
    torch.testing.assert_close(ours[:-own], plain[:-own] / norm, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours[-own:], plain[-own:], rtol=1e-4, atol=1e-6)
