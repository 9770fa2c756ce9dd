"""`clip_range_scaling` in the trainer: one range, by the length of the unit, for all that reads one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_trl import SOGRPOConfig, SOGRPOTrainer
from sorl_trl.ops import importance_ratio, is_clipped, is_outside, turn_layout
from sorl_trl.trainers.checks.options import idle_options
from sorl_trl.trainers.loss.micro_batch import ClipRange, ClipRanges, MicroBatch, clip_ranges
from tests.losses import EPSILON, gradient, off_policy_batch, token_logps
from tests.training import settings, train

POWER = {"none": 0.0, "sqrt_length": 0.5, "length": 1.0}
PLAIN = {"clip_normalization": "none", "num_iterations": 2}


def units_of(turn_ids: Tensor, level: str) -> list[list[int]]:
    """The positions of one trajectory that share a ratio."""
    tokens = torch.nonzero(turn_ids >= 0).flatten().tolist()
    if level == "sequence":
        return [tokens]
    return [[t for t in tokens if turn_ids[t] == k] for k in range(int(turn_ids.max()) + 1)]


def log_ratios(trainer: Any, batch: dict[str, Any]) -> Tensor:
    return token_logps(trainer, batch) - batch["old_per_token_logps"]


def reference_loss(trainer: Any, batch: dict[str, Any]) -> Tensor:
    """Minus the surrogate of each unit by its own range, with the means of `loss_type` "turn" and "grpo"."""
    args, log_ratio = trainer.args, log_ratios(trainer, batch)
    total = torch.zeros((), dtype=torch.float64)
    for i, turn_ids in enumerate(batch["turn_ids"]):
        tokens, turns = int((turn_ids >= 0).sum()), int(turn_ids.max()) + 1
        for unit in units_of(turn_ids, args.importance_sampling_level):
            logs, advantage = log_ratio[i, unit], batch["advantages"][i].double()
            ratio = logs.mean().exp() if args.turn_ratio == "geometric" else logs.exp().mean()
            shrink = len(unit) ** POWER[args.clip_range_scaling_in_use]
            clipped = ratio.clamp(1 - EPSILON / shrink, 1 + EPSILON / shrink)
            bounded = ratio if args.delta is None else ratio.clamp(max=1 + (args.delta - 1) / shrink)
            of_unit = torch.min(bounded * advantage, clipped * advantage)
            for turn in {int(turn_ids[t]) for t in unit}:
                share = sum(int(turn_ids[t]) == turn for t in unit)
                length = int((turn_ids == turn).sum())
                weight = share / (turns * length) if args.loss_type == "turn" else share / tokens
                total = total - weight * of_unit
    return total / len(log_ratio)


@pytest.mark.parametrize(
    "fields",
    [
        {"clip_range_scaling": "sqrt_length"},
        {"clip_range_scaling": "length"},
        {"clip_range_scaling": "length", "delta": 1.3},
        {"clip_range_scaling": "length", "loss_type": "grpo"},
        {"clip_range_scaling": "sqrt_length", "turn_ratio": "arithmetic"},
        {"clip_range_scaling": "length", "importance_sampling_level": "sequence"},
        {"clip_range_scaling": "length", "importance_sampling_level": "sequence", "loss_type": "grpo"},
        {
            "clip_range_scaling": "sqrt_length",
            "importance_sampling_level": "sequence",
            "loss_type": "grpo",
            "delta": 1.3,
        },
    ],
    ids=str,
)
def test_loss_and_gradient_are_those_of_the_formula(tmp_path: Path, tokenizer: Any, fields: dict[str, Any]) -> None:
    trainer, batch = off_policy_batch(tmp_path, tokenizer, **PLAIN, **fields)
    ours, reference = trainer._compute_loss(trainer.model, batch), reference_loss(trainer, batch)
    assert ours.item() == pytest.approx(reference.item(), abs=1e-6)
    torch.testing.assert_close(gradient(ours, trainer), gradient(reference, trainer), rtol=0, atol=1e-6)
    trainer.args.clip_range_scaling = "none"
    assert abs(ours.item() - reference_loss(trainer, batch).item()) > 1e-4


@pytest.mark.parametrize("level", ["turn", "sequence"])
def test_units_of_one_token_have_the_range_of_a_token(tmp_path: Path, tokenizer: Any, level: str) -> None:
    found = {}
    for scaling in ("none", "sqrt_length", "length"):
        trainer, batch = off_policy_batch(
            tmp_path, tokenizer, **PLAIN, importance_sampling_level=level, clip_range_scaling=scaling
        )
        kept = batch["turn_ids"] >= 0
        if level == "sequence":
            kept &= kept.long().cumsum(1) == 1
            batch["tool_mask"] = kept.long()
        batch["turn_ids"] = torch.where(kept, kept.long().cumsum(1) - 1, -1)
        batch["turn_counts"] = kept.sum(1)
        loss = trainer._compute_loss(trainer.model, batch)
        found[scaling] = loss.item(), gradient(loss, trainer)
        assert trainer._metrics["train"]["clip_fraction/token"][-1] > 0.1
        token = dict(importance_sampling_level="token", clip_range_scaling="none", **PLAIN)
    of_tokens = off_policy_batch(tmp_path, tokenizer, **token)[0]
    of_tokens = of_tokens._compute_loss(of_tokens.model, batch)
    assert found["none"][0] == pytest.approx(of_tokens.item(), abs=1e-6)
    for scaling in ("sqrt_length", "length"):
        assert found[scaling][0] == pytest.approx(found["none"][0], abs=1e-6)
        torch.testing.assert_close(found[scaling][1], found["none"][1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("normalization", ["bias_norm", "none"])
@pytest.mark.parametrize("level", ["turn", "sequence"])
def test_gradients_do_not_depend_on_micro_batches(
    tmp_path: Path, tokenizer: Any, level: str, normalization: str
) -> None:
    weights = []
    for batch_size, accumulation in ((8, 1), (2, 4)):
        arguments = settings(tmp_path, optim="sgd", learning_rate=3.0, max_steps=2, clip_range_scaling="length")
        arguments |= {"importance_sampling_level": level, "clip_normalization": normalization, "loss_type": "grpo"}
        arguments |= {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
        arguments |= {"steps_per_generation": accumulation, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
        trainer = train(SOGRPOTrainer, SOGRPOConfig, tokenizer, **arguments)
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
        assert trainer.state.log_history[1][f"clip_fraction/{level}"] > 0
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("level", ["turn", "sequence"])
def test_bias_norm_counts_what_the_scaled_range_clips(tmp_path: Path, tokenizer: Any, level: str) -> None:
    wide = {"epsilon": 0.9, "clip_normalization": "bias_norm", "num_iterations": 2}
    trainer, batch = off_policy_batch(tmp_path, tokenizer, importance_sampling_level=level, **wide)
    trainer._compute_loss(trainer.model, batch)
    assert trainer._bias_normalizer._gradients is None
    trainer.args.clip_range_scaling = "length"
    trainer._compute_loss(trainer.model, batch)
    total, log_ratio = torch.zeros((), dtype=torch.float64), log_ratios(trainer, batch)
    for i, advantage in enumerate(batch["advantages"].tolist()):
        for unit in units_of(batch["turn_ids"][i], level):
            ratio, epsilon = log_ratio[i, unit].mean().exp(), 0.9 / len(unit)
            if (advantage > 0 and ratio > 1 + epsilon) or (advantage < 0 and ratio < 1 - epsilon):
                total = total + ratio * advantage * len(unit) / (batch["turn_ids"][i] >= 0).sum()
    accumulated = torch.cat([g.flatten() for g in trainer._bias_normalizer._gradients]).double()
    torch.testing.assert_close(accumulated, gradient(total / len(log_ratio), trainer), rtol=0, atol=1e-6)


class TestPenalty:
    """Token ratios have ε itself, whose unit has one token; the gate's own range is scaled as the clip range is."""

    def penalty(self, tmp_path: Path, tokenizer: Any, **fields: Any) -> tuple[Any, dict[str, Any], Tensor]:
        fields = {"num_iterations": 2, "clip_range_scaling": "length", **fields}
        trainer, batch = off_policy_batch(tmp_path, tokenizer, **fields)
        ours = trainer._compute_loss(trainer.model, batch)
        trainer.args.clip_normalization = "none"
        return trainer, batch, ours - trainer._compute_loss(trainer.model, batch)

    def reference(self, trainer: Any, batch: dict[str, Any], gate: str, epsilon: float) -> float:
        log_ratio, total = log_ratios(trainer, batch), 0.0
        for i, turn_ids in enumerate(batch["turn_ids"]):
            logs = log_ratio[i, turn_ids >= 0]
            units = units_of(turn_ids, "turn") if gate == "turn" else [[t] for t in units_of(turn_ids, "sequence")[0]]
            ratios = [(log_ratio[i, unit].mean().exp().item(), epsilon / len(unit)) for unit in units]
            outside = sum(not 1 - width <= ratio <= 1 + width for ratio, width in ratios) / len(units)
            total += 3.0 * outside * (logs.exp() * logs - logs.exp() + 1).mean().item()
        return total / len(log_ratio)

    @pytest.mark.parametrize("gate", ["token", "turn"])
    @pytest.mark.parametrize("own", [None, 0.4])
    def test_the_gate_reads_the_range_of_its_unit(
        self, tmp_path: Path, tokenizer: Any, gate: str, own: float | None
    ) -> None:
        trainer, batch, penalty = self.penalty(tmp_path, tokenizer, ctn_gate=gate, ctn_epsilon=own)
        expected = self.reference(trainer, batch, gate, own or EPSILON)
        assert penalty.item() == pytest.approx(expected, abs=1e-5)

    def test_token_ratios_in_the_loss_leave_turns_to_the_gate(self, tmp_path: Path, tokenizer: Any) -> None:
        token = {"importance_sampling_level": "token", "ctn_gate": "turn"}
        trainer, batch, penalty = self.penalty(tmp_path, tokenizer, **token)
        assert penalty.item() == pytest.approx(self.reference(trainer, batch, "turn", EPSILON), abs=1e-5)
        logged = trainer._metrics["train"]
        assert 0 < logged["clip_range/low"][-1] < EPSILON
        assert logged["clip_fraction/turn"][-1] > logged["clip_fraction/token"][-1]

    def test_it_reads_the_kind_of_mean_at_every_level(self, tmp_path: Path) -> None:
        """`turn_ratio` has an effect there, so that nothing says it has none, and no law of another mean is taken."""
        plain = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "turn_ratio": "arithmetic"}
        gate = {"clip_normalization": "kl_penalty", "ctn_gate": "turn"}
        assert [each.option for each in idle_options(SOGRPOConfig(**plain))] == ["turn_ratio"]
        assert not [*idle_options(SOGRPOConfig(**plain, **gate, importance_sampling_level="token"))]
        with pytest.raises(ValueError, match="`clip_range_scaling` is not set and stands for 'length', which"):
            SOGRPOConfig(**plain, **gate)
        SOGRPOConfig(**plain, **gate, clip_range_scaling="sqrt_length")


class TestMetrics:
    @pytest.mark.parametrize("level", ["turn", "sequence"])
    def test_they_read_the_range_of_the_surrogate(self, tmp_path: Path, tokenizer: Any, level: str) -> None:
        fields = {"importance_sampling_level": level, "clip_range_scaling": "length", "loss_type": "grpo"}
        trainer, batch = off_policy_batch(tmp_path, tokenizer, **PLAIN, **fields)
        trainer._compute_loss(trainer.model, batch)
        logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
        log_ratio = log_ratios(trainer, batch).detach()
        rows = [
            (log_ratio[i, unit].mean().exp().item(), EPSILON / len(unit), len(unit), batch["advantages"][i].item())
            for i, turn_ids in enumerate(batch["turn_ids"])
            for unit in units_of(turn_ids, level)
        ]
        tokens = sum(length for _, _, length, _ in rows)
        outside = [abs(ratio - 1) > epsilon for ratio, epsilon, _, _ in rows]
        below = [(r < 1 - e and a < 0) * length for r, e, length, a in rows]
        above = [(r > 1 + e and a > 0) * length for r, e, length, a in rows]
        assert logged[f"clip_fraction/{level}"] == pytest.approx(sum(outside) / len(rows))
        assert logged["clip_ratio/low_mean"] == pytest.approx(sum(below) / tokens)
        assert logged["clip_ratio/high_mean"] == pytest.approx(sum(above) / tokens)
        assert 0 < logged["clip_ratio/region_mean"] < 1
        mean_range = sum(epsilon for _, epsilon, _, _ in rows) / len(rows)
        assert logged["clip_range/low"] == pytest.approx(mean_range)
        assert logged["clip_range/high"] == pytest.approx(mean_range)
        of_tokens = is_outside(log_ratio.exp(), EPSILON, EPSILON)[batch["turn_ids"] >= 0]
        assert logged["clip_fraction/token"] == pytest.approx(of_tokens.double().mean().item())
        if level == "turn":
            negative = [r < 1 - e for r, e, _, a in rows if a < 0]
            assert logged["clip_fraction/negative_turn"] == pytest.approx(sum(negative) / len(negative))

    def test_an_unscaled_range_needs_none_of_its_own(self, tmp_path: Path, tokenizer: Any) -> None:
        trainer, batch = off_policy_batch(tmp_path, tokenizer, **PLAIN)
        trainer._compute_loss(trainer.model, batch)
        assert not {"clip_range/low", "clip_range/high", "clip_fraction/sequence"} & trainer._metrics["train"].keys()


@pytest.mark.parametrize("delta", [None, 1.3])
def test_the_dump_says_of_each_token_what_the_surrogate_does(
    tmp_path: Path, tokenizer: Any, delta: float | None
) -> None:
    trainer, batch = off_policy_batch(tmp_path, tokenizer, **PLAIN)
    turns = turn_layout(batch["turn_ids"])
    advantages = torch.tensor([1.0, -1.0]).repeat(4).unsqueeze(1)
    log_ratio = log_ratios(trainer, batch).detach().float()
    ratio = importance_ratio(log_ratio, turns, "turn")
    ranges = clip_ranges(ClipRange(EPSILON, EPSILON, delta), turns, "turn", "length")
    made = MicroBatch(
        log_ratio, turns, advantages, ranges, {}, True, step=1, age=1, ends_step=True, has_own_surrogate=True
    )
    states = trainer._dump._clip_states(ratio, made)
    clipped = is_clipped(ratio, advantages, *ranges.units) & turns.loss_mask
    outside = is_outside(ratio, ranges.units.low, ranges.units.high) & turns.loss_mask
    found = [[state == "clipped" for state in row] for row in states]
    assert torch.equal(torch.tensor(found), clipped)
    found = [[state in ("clipped", "outside") for state in row] for row in states]
    assert torch.equal(torch.tensor(found), outside)
    unscaled = ClipRanges(*[ClipRange(EPSILON, EPSILON, delta)] * 3)
    before = MicroBatch(
        log_ratio, turns, advantages, unscaled, {}, True, step=1, age=1, ends_step=True, has_own_surrogate=True
    )
    assert trainer._dump._clip_states(ratio, before) != states


def test_a_run_is_clipped_with_the_length_and_not_without(tmp_path: Path, tokenizer: Any) -> None:
    """Turns of up to five tokens, which move too little for a range of 0.3 at this learning rate."""
    shares = {}
    for scaling in ("none", "length"):
        fields = settings(tmp_path, clip_range_scaling=scaling, epsilon=0.3, learning_rate=4e-3, **PLAIN)
        trainer = train(SOGRPOTrainer, SOGRPOConfig, tokenizer, **{**fields, "target_kl": 0.0, "num_iterations": 4})
        shares[scaling] = [log["clip_fraction/turn"] for log in trainer.state.log_history if "loss" in log]
    assert max(shares["none"]) == 0 < max(shares["length"])
