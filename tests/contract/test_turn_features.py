"""TRL's loss types and features at the turn level, against their formulas written out as loops in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from sorl_trl import SOGRPOConfig, SOGRPOTrainer
from tests.losses import EPSILON, gradient, off_policy_batch, token_logps
from tests.training import assert_same, settings, train

pytestmark = pytest.mark.trains

FEATURES: dict[str, dict[str, Any]] = {
    "turn": {},
    "turn_delta": {"delta": 1.1},
    "turn_entropy": {"top_entropy_quantile": 0.5},
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "delta": 1.1},
    "bnpo": {"loss_type": "bnpo", "top_entropy_quantile": 0.5},
    "dapo": {"loss_type": "dapo"},
    "dapo_reference_kl": {"loss_type": "dapo", "beta": 0.1},
    "sapo": {"loss_type": "sapo"},
    "luspo": {"loss_type": "luspo"},
}
THRESHOLD = 0.15
"""Of the off-policy mask: between the batch's distances as they are and as turn ratios would make them look."""
EVERYTHING = {"delta": 1.1, "beta": 0.1, "top_entropy_quantile": 0.5, "off_policy_mask_threshold": THRESHOLD}


def turn_spans(batch: dict[str, Any]) -> list[list[Tensor]]:
    """The positions of each turn of each trajectory."""
    return [[torch.nonzero(row == k).flatten() for k in range(int(row.max()) + 1)] for row in batch["turn_ids"]]


def token_advantages(batch: dict[str, Any]) -> Tensor:
    advantages = batch["advantages"].double()
    return (advantages.unsqueeze(1) if advantages.dim() == 1 else advantages).expand(batch["turn_ids"].shape)


def off_policy_kept(logps: Tensor, batch: dict[str, Any], threshold: float) -> Tensor:
    """(B, T) 1 but where the advantage is negative and the sampling policy is too far from the policy."""
    sampling = batch.get("sampling_per_token_logps", batch["old_per_token_logps"])
    kept = torch.ones_like(logps)
    for i, spans in enumerate(turn_spans(batch)):
        tokens = torch.cat(spans).tolist()
        differences = [(sampling[i, t] - logps[i, t]).item() for t in tokens]
        distance = sum(d for d in differences if d == d) / len(tokens)  # NaN: a token without evidence
        for t in tokens:
            kept[i, t] = float(token_advantages(batch)[i, t] >= 0 or distance <= threshold)
    return kept


def high_entropy(trainer: Any, batch: dict[str, Any], share: float) -> Tensor:
    """(B, T) 1 on the model tokens of the batch whose entropy is in the upper `share`."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    width = batch["completion_ids"].shape[1]
    logits = trainer.model(input_ids=ids, attention_mask=mask).logits[:, -width - 1 : -1]
    entropies = torch.distributions.Categorical(logits=logits.detach()).entropy()
    return (entropies >= entropies[batch["turn_ids"] >= 0].quantile(1 - share)).double()


def surrogate(ratio: Tensor, advantages: Tensor, args: SOGRPOConfig) -> Tensor:
    """Of the tokens of one turn, to be maximised."""
    if args.loss_type == "sapo":
        temperature = torch.where(advantages > 0, args.sapo_temperature_pos, args.sapo_temperature_neg)
        return torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantages
    bounded = ratio if args.delta is None else ratio.clamp(max=args.delta)
    return torch.min(bounded * advantages, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantages)


def aggregate(x: list[list[Tensor]], loss_type: str, num_items: int, max_length: int) -> Tensor:
    """What each loss type makes of one value per token, `x[trajectory][turn][token]`."""
    rows = [torch.cat(turns) for turns in x]
    tokens = torch.cat(rows)
    if loss_type == "turn":
        return torch.stack([torch.stack([turn.mean() for turn in turns]).mean() for turns in x]).mean()
    if loss_type == "luspo":
        return torch.stack([row.sum() for row in rows]).mean()
    divisors = {"dapo": num_items, "bnpo": len(tokens), "dr_grpo": len(rows) * max_length}
    if loss_type in divisors:
        return tokens.sum() / divisors[loss_type]
    return torch.stack([row.mean() for row in rows]).mean()  # "grpo" and "sapo"


def reference_loss(trainer: Any, batch: dict[str, Any]) -> Tensor:
    args: SOGRPOConfig = trainer.args
    logps, advantages = token_logps(trainer, batch), token_advantages(batch)
    weights = batch.get("importance_sampling_ratio", torch.ones(8, 1)).double().expand_as(logps)
    if args.off_policy_mask_threshold is not None:
        weights = weights * off_policy_kept(logps, batch, args.off_policy_mask_threshold)
    weights = weights * high_entropy(trainer, batch, args.top_entropy_quantile)
    losses: list[list[Tensor]] = []
    kls: list[list[Tensor]] = []
    for i, spans in enumerate(turn_spans(batch)):
        losses.append([])
        kls.append([])
        for span in spans:
            log_ratio = logps[i, span] - batch["old_per_token_logps"][i, span]
            ratio = log_ratio.mean().exp() if args.turn_ratio == "geometric" else log_ratio.exp().mean()
            losses[-1].append(-surrogate(ratio, advantages[i, span], args) * weights[i, span])
            difference = batch["ref_per_token_logps"][i, span] - logps[i, span] if args.beta else 0 * log_ratio
            kls[-1].append(ratio * (difference.exp() - difference - 1))
    sizes = int(batch["num_items_in_batch"]), args.max_completion_length
    kl = aggregate(kls, "grpo" if args.loss_type == "turn" else args.loss_type, *sizes)  # a token mean either way
    return aggregate(losses, args.loss_type, *sizes) + args.beta * kl


def assert_follows_the_formula(trainer: Any, batch: dict[str, Any]) -> None:
    ours, reference = trainer._compute_loss(trainer.model, batch), reference_loss(trainer, batch)
    assert ours.item() == pytest.approx(reference.item(), abs=2e-6)
    torch.testing.assert_close(gradient(ours, trainer), gradient(reference, trainer), rtol=0, atol=5e-6)


def scattered(tmp_path: Path, tokenizer: Any, width: str, **overrides: Any) -> tuple[SOGRPOTrainer, dict[str, Any]]:
    """An off-policy batch with advantages of both signs: (B,), or (B, T) with another one at each token."""
    overrides = {"num_iterations": 2, "clip_normalization": "none", **overrides}
    trainer, batch = off_policy_batch(tmp_path, tokenizer, **overrides)
    shape = (8,) if width == "trajectory" else batch["turn_ids"].shape
    batch["advantages"] = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return trainer, batch


@pytest.mark.parametrize("width", ["trajectory", "token"])
@pytest.mark.parametrize("turn_ratio", ["geometric", "arithmetic"])
@pytest.mark.parametrize("feature", FEATURES)
def test_loss_types_and_features(tmp_path: Path, tokenizer: Any, feature: str, turn_ratio: str, width: str) -> None:
    trainer, batch = scattered(tmp_path, tokenizer, width, turn_ratio=turn_ratio, **FEATURES[feature])
    assert_follows_the_formula(trainer, batch)


@pytest.mark.parametrize("width", ["trajectory", "token"])
@pytest.mark.parametrize("sampling", [False, True], ids=["old", "sampling"])
@pytest.mark.parametrize("turn_ratio", ["geometric", "arithmetic"])
def test_off_policy_mask(tmp_path: Path, tokenizer: Any, turn_ratio: str, sampling: bool, width: str) -> None:
    """It compares token by token with the sampling policy, or the old one where the engine reports nothing."""
    overrides: dict[str, Any] = {"turn_ratio": turn_ratio, "off_policy_mask_threshold": THRESHOLD}
    trainer, batch = scattered(tmp_path, tokenizer, width, **overrides)
    if sampling:
        noise = torch.randn(batch["turn_ids"].shape, generator=torch.Generator().manual_seed(2))
        batch["sampling_per_token_logps"] = batch["old_per_token_logps"] + 0.3 * noise
        batch["sampling_per_token_logps"][:, 0] = torch.nan  # vLLM could not score these
    kept = off_policy_kept(token_logps(trainer, batch), batch, THRESHOLD)[batch["turn_ids"] >= 0]
    assert 0 < kept.mean() < 1
    assert_follows_the_formula(trainer, batch)


@pytest.mark.parametrize("loss_type", ["turn", "dapo"])
def test_everything_together(tmp_path: Path, tokenizer: Any, loss_type: str) -> None:
    trainer, batch = scattered(
        tmp_path, tokenizer, "token", loss_type=loss_type, turn_ratio="arithmetic", **EVERYTHING
    )
    ratios = torch.rand(batch["turn_ids"].shape, generator=torch.Generator().manual_seed(3))
    batch["importance_sampling_ratio"] = ratios + 0.5
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    assert_follows_the_formula(trainer, batch)


@pytest.mark.parametrize("turn_ratio", ["geometric", "arithmetic"])
def test_vespo_is_trls_at_every_level(tmp_path: Path, tokenizer: Any, turn_ratio: str) -> None:
    """It weighs whole sequences from token log-ratios by itself: turn ratios must not reach it."""
    arguments = settings(tmp_path, loss_type="vespo", max_steps=4)
    theirs = train(GRPOTrainer, GRPOConfig, tokenizer, **arguments)
    turn_level: dict[str, Any] = {"importance_sampling_level": "turn", "turn_ratio": turn_ratio}
    turn_level |= {"clip_normalization": "none", "target_kl": 0.0}
    ours = train(SOGRPOTrainer, SOGRPOConfig, tokenizer, **arguments, **turn_level)
    assert_same(ours, theirs)
    assert ours.state.log_history[3]["clip_fraction/turn"] > 0
