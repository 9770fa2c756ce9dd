"""Loss and gradient of every piece against loops in float64, trajectory by trajectory and turn by turn."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_trl.methods import METHODS, ClipPenalty
from sorl_trl.trainers.batch import drop
from tests.documentation import ROOT, code_blocks
from tests.losses import (
    assert_same_loss,
    gradient,
    off_policy_batch,
    positions,
    reference_loss,
    reference_penalty,
    token_logps,
)
from tests.trajectories import SeveralContexts, parity_reward

pytestmark = pytest.mark.trains
OFF: dict[str, Any] = {"target_kl": 0.0}
LOSS_TYPES = ("turn", "grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "vespo", "luspo")


def assert_follows_the_loops(trainer: Any, batch: dict[str, Any], terms: float | Tensor = 0.0) -> None:
    assert_same_loss(trainer, trainer._compute_loss(trainer.model, batch), reference_loss(trainer, batch) + terms)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", ["turn", "sequence", "token"])
def test_every_loss_type_at_every_level(tmp_path: Path, tokenizer: Any, loss_type: str, level: str) -> None:
    cap = {"epsilon_high": 1.05} if loss_type == "cispo" else {}
    fields = {"loss_type": loss_type, "importance_sampling_level": level, **cap, **OFF}
    trainer, batch = off_policy_batch(tmp_path, tokenizer, **fields)
    assert_follows_the_loops(trainer, batch)
    if loss_type not in ("cispo", "sapo", "vespo"):
        assert 0 < trainer._metrics["train"]["clip_ratio/region_mean"][-1] < 1


@pytest.mark.parametrize("loss_type", ["turn", "dapo"])
def test_each_context_is_read_alone(tmp_path: Path, tokenizer: Any, loss_type: str) -> None:
    """Ratios, means and clip ranges are the trajectory's; log-probabilities those of each context by itself."""
    fields = {"loss_type": loss_type, "rollout_func": SeveralContexts(), "beta": 0.1, **OFF}
    trainer, batch = off_policy_batch(tmp_path, tokenizer, **fields)
    assert batch["context_ids"].min() < 0 < batch["context_ids"].max()
    assert_follows_the_loops(trainer, batch)


@pytest.mark.parametrize(
    "fields",
    [
        {"turn_ratio": "arithmetic"},
        {"scale_clip_range": False},
        {"delta": 1.3},
        {"epsilon_high": 0.5, "delta": 1.2},
        {"beta": 0.1},
        {"beta": 0.1, "use_bias_correction_kl": False, "loss_type": "dapo"},
    ],
    ids=str,
)
def test_ranges_ratios_and_the_reference(tmp_path: Path, tokenizer: Any, fields: dict[str, Any]) -> None:
    trainer, batch = off_policy_batch(tmp_path, tokenizer, **OFF, **fields)
    assert_follows_the_loops(trainer, batch)


def test_the_reference_is_not_asked_about_observations(tmp_path: Path, tokenizer: Any) -> None:
    """Of which it may think anything: what is infinite there would be NaN in the gradient."""
    trainer, batch = off_policy_batch(tmp_path, tokenizer, **OFF, beta=0.1)
    clean = gradient(trainer._compute_loss(trainer.model, batch), trainer)
    batch["ref_per_token_logps"] = torch.where(batch["turn_ids"] < 0, 1e3, batch["ref_per_token_logps"])
    assert torch.equal(gradient(trainer._compute_loss(trainer.model, batch), trainer), clean)


@pytest.mark.parametrize("width", [1, None], ids=["sequence", "token"])
def test_the_engines_weights_multiply_the_surrogate(tmp_path: Path, tokenizer: Any, width: int | None) -> None:
    """TRL's (B, 1) and (B, T) ratios of old to sampling policy."""
    trainer, batch = off_policy_batch(tmp_path, tokenizer, loss_type="grpo", **OFF)
    shape = (8, width or batch["completion_ids"].shape[1])
    batch["importance_sampling_ratio"] = torch.rand(shape, generator=torch.Generator().manual_seed(3)) + 0.5
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    assert_follows_the_loops(trainer, batch)


def test_vespos_weight_of_a_sequence_contains_those_of_the_engine(tmp_path: Path, tokenizer: Any) -> None:
    """It is that of π_θ/μ, which the loss is not multiplied by once more."""
    trainer, batch = off_policy_batch(tmp_path, tokenizer, loss_type="vespo", **OFF)
    weights = (
        torch.rand(batch["turn_ids"].shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.5
    )
    weights = torch.where(batch["turn_ids"] >= 0, weights, 1.0)
    sampled = {**batch, "old_per_token_logps": batch["old_per_token_logps"] - weights.log()}
    expected = reference_loss(trainer, sampled)
    batch["importance_sampling_ratio"] = weights
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    assert_same_loss(trainer, trainer._compute_loss(trainer.model, batch), expected)


@pytest.mark.parametrize(
    "piece",
    [
        ClipPenalty(),
        ClipPenalty(coef=3.0, epsilon=None),
        ClipPenalty(epsilon=0.1),
    ],
    ids=str,
)
def test_the_penalty(tmp_path: Path, tokenizer: Any, piece: ClipPenalty) -> None:
    trainer, batch = off_policy_batch(tmp_path, tokenizer, {"terms": piece}, **OFF)
    assert_follows_the_loops(trainer, batch, reference_penalty(trainer, batch, piece))
    assert trainer._metrics["train"]["clip_penalty"][-1] > 0


def test_so_grpo_is_what_the_docs_show(tmp_path: Path, tokenizer: Any) -> None:
    (shown,) = code_blocks(ROOT / "docs" / "internals" / "equations.md", "python")
    assert len(shown.splitlines()) <= 40
    names: dict[str, Any] = {}
    exec(shown, names)
    trainer, batch = off_policy_batch(tmp_path, tokenizer, METHODS["so_grpo"])
    columns = zip(batch["completion_ids"], batch["completion_mask"], strict=True)
    kept = [ids[mask.bool()].tolist() for ids, mask in columns]
    rewards = torch.tensor(parity_reward(kept), dtype=torch.float64)
    advantages = names["advantages_of"](rewards, trainer.num_generations)
    torch.testing.assert_close(batch["advantages"], advantages, rtol=0, atol=1e-6)
    given = token_logps(trainer, batch), batch["old_per_token_logps"], batch["turn_ids"], batch["advantages"]
    ours = trainer._compute_loss(trainer.model, batch)
    assert trainer._metrics["train"]["clip_ratio/region_mean"][-1] > 0 < trainer._metrics["train"]["clip_penalty"][-1]
    assert_same_loss(trainer, ours, names["so_grpo_loss"](*given))


@pytest.mark.parametrize("loss_type", ["turn", "grpo", "dapo", "dr_grpo", "luspo"])
@pytest.mark.parametrize("level", ["token", "turn"])
def test_dropped_rows_leave_loss_and_denominators(tmp_path: Path, tokenizer: Any, loss_type: str, level: str) -> None:
    """Also if several pieces drop some, and agree on one."""
    method = {"terms": ClipPenalty()}
    fields = {"loss_type": loss_type, "importance_sampling_level": level, **OFF}
    trainer, batch = off_policy_batch(tmp_path, tokenizer, method, **fields)
    kept = torch.tensor([True, False, True, True, False, False, True, True])
    part = {name: value[kept] if value.dim() else value for name, value in batch.items()}
    part["num_items_in_batch"] = (part["turn_ids"] >= 0).sum()
    expected = trainer._compute_loss(trainer.model, part)
    for dropped in ([1, 4], [4, 5]):
        drop(batch, torch.tensor([row not in dropped for row in range(8)]), trainer.accelerator)
    assert_same_loss(trainer, trainer._compute_loss(trainer.model, batch), expected)


def test_everything_dropped_is_a_loss_of_nothing(tmp_path: Path, tokenizer: Any) -> None:
    trainer, batch = off_policy_batch(tmp_path, tokenizer, {"terms": ClipPenalty()}, **OFF)
    drop(batch, torch.zeros(8, dtype=torch.bool), trainer.accelerator)
    loss = trainer._compute_loss(trainer.model, batch)
    assert loss.item() == 0.0
    assert not gradient(loss, trainer).any()


def test_each_turn_of_a_sequence_is_moved_by_its_own_advantage(tmp_path: Path, tokenizer: Any) -> None:
    """The ratio is the sequence's; as a mean of its tokens it would move all turns by their mean advantage."""
    fields = {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 50.0, **OFF}
    trainer, batch = off_policy_batch(tmp_path, tokenizer, **fields)
    mask = batch["turn_ids"] >= 0
    batch["advantages"] = (torch.where(batch["turn_ids"] % 2 == 0, 1.5, -1.0) * mask).double()
    assert_follows_the_loops(trainer, batch)


@pytest.mark.parametrize("log_ratio", [95.0, -95.0, math.inf])
@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
def test_no_log_ratio_makes_the_loss_infinite(tmp_path: Path, tokenizer: Any, log_ratio: float, level: str) -> None:
    trainer, batch = off_policy_batch(
        tmp_path, tokenizer, {"terms": ClipPenalty()}, importance_sampling_level=level, **OFF
    )
    row = int(batch["advantages"].argmin())
    position = positions(batch["turn_ids"][row])[0][0]
    batch["old_per_token_logps"][row, position] -= log_ratio
    loss = trainer._compute_loss(trainer.model, batch)
    assert loss.isfinite()
    assert gradient(loss, trainer).isfinite().all()


@pytest.mark.parametrize("delta", [None, 1.3])
def test_bias_norm_divides_the_gradient(tmp_path: Path, tokenizer: Any, delta: float | None) -> None:
    """The gradient of the step is ∇J / max(1, ‖C‖), with C from a loop over the clipped tokens."""
    fields = {"bias_norm": True, "loss_type": "grpo", "delta": delta, **OFF}
    trainer, batch = off_policy_batch(tmp_path, tokenizer, **fields)
    batch["advantages"] = 60.0 * batch["advantages"]  # so that the norm is above its floor of 1
    plain = gradient(reference_loss(trainer, batch), trainer)
    logps = token_logps(trainer, batch)
    bias = torch.zeros((), dtype=torch.float64)
    for i, turn_ids in enumerate(batch["turn_ids"]):
        advantage = batch["advantages"][i].item()
        for turn in positions(turn_ids):
            ratio = (logps[i] - batch["old_per_token_logps"][i])[turn].mean().exp()
            scale = len(turn) ** -0.75
            above = ratio > 1 + scale * (trainer.args.epsilon if advantage > 0 else (delta or math.inf) - 1)
            if above or (advantage < 0 and ratio < 1 - scale * trainer.args.epsilon):
                bias = bias + ratio * advantage * len(turn) / (turn_ids >= 0).sum() / 8
    norm = gradient(bias, trainer).norm().item()
    assert norm > 1
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    assert trainer._bias_normalizer.normalize(trainer.accelerator) == pytest.approx(norm, rel=1e-5)
    found = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    torch.testing.assert_close(found, plain / norm, rtol=1e-5, atol=1e-7)
