"""Loss and gradient of every piece against loops in float64, trajectory by trajectory and turn by turn."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_trl.methods import LLDS, METHODS, ClipPenalty, DoubleSided, Method, MiniRL, Unweighted
from sorl_trl.trainers.batch import OLD_POLICY_STEP, drop
from tests.losses import assert_same_loss, gradient, off_policy_batch, token_logps
from tests.trajectories import SeveralContexts

pytestmark = pytest.mark.trains
POWER = {"none": 0.0, "sqrt_length": 0.5, "length": 1.0}
OFF: dict[str, Any] = {"target_kl": 0.0}


def positions(turn_ids: Tensor) -> list[list[int]]:
    """The positions of each turn of a trajectory."""
    return [torch.nonzero(turn_ids == k).flatten().tolist() for k in range(int(turn_ids.max()) + 1)]


def unit_of(t: int, turn_ids: Tensor, level: str) -> list[int]:
    turns = positions(turn_ids)
    return {"token": [t], "turn": turns[int(turn_ids[t])], "sequence": [*chain(*turns)]}[level]


def token_objective(trainer: Any, log_ratio: Tensor, t: int, turn_ids: Tensor, advantage: float) -> Tensor:
    """What is maximised for one token."""
    args, kind = trainer.args, trainer.method.surrogate
    unit = unit_of(t, turn_ids, args.importance_sampling_level)
    logs = log_ratio[unit]
    arithmetic = args.turn_ratio == "arithmetic" and args.importance_sampling_level == "turn"
    ratio = logs.exp().mean() if arithmetic else logs.mean().exp()
    shrink = len(unit) ** POWER[args.clip_range_scaling]
    high = args.epsilon if args.epsilon_high is None else args.epsilon_high
    clipped = ratio.clamp(1 - args.epsilon / shrink, 1 + high / shrink)
    if isinstance(kind, DoubleSided):
        return clipped * advantage
    if isinstance(kind, MiniRL):
        stopped = (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - args.epsilon)
        own = (log_ratio[t] - log_ratio[t].detach()).exp()
        return own * advantage * min(ratio.item(), kind.cap) * (0.0 if stopped else 1.0)
    bounded = ratio if args.delta is None else ratio.clamp(max=1 + (args.delta - 1) / shrink)
    return torch.min(bounded * advantage, clipped * advantage)


def reference_loss(trainer: Any, batch: dict[str, Any], rows: list[int] | None = None) -> Tensor:
    """The loss without terms, of these rows alone where they are given."""
    args, logps = trainer.args, token_logps(trainer, batch)
    log_ratio = logps - batch["old_per_token_logps"]
    total, rows = torch.zeros((), dtype=torch.float64), rows or list(range(len(logps)))
    weights = batch.get("importance_sampling_ratio", torch.ones(1)).expand_as(logps)
    for i in rows:
        turn_ids = batch["turn_ids"][i]
        turns, tokens = positions(turn_ids), int((turn_ids >= 0).sum())
        of_row = torch.zeros((), dtype=torch.float64)
        for turn in turns:
            for t in turn:
                advantage = batch["advantages"].reshape(len(logps), -1).expand_as(logps)[i, t].item()
                loss = -weights[i, t] * token_objective(trainer, log_ratio[i], t, turn_ids, advantage)
                share = 1 / (len(turns) * len(turn)) if args.loss_type == "turn" else 1 / tokens
                of_row = of_row + share * loss
                if args.beta:
                    difference = batch["ref_per_token_logps"][i, t] - logps[i, t]
                    kl = difference.exp() - difference - 1
                    of_unit = log_ratio[i, unit_of(t, turn_ids, args.importance_sampling_level)].mean().exp()
                    of_row = of_row + args.beta * kl * (of_unit if args.use_bias_correction_kl else 1) / tokens
        total = total + (of_row * tokens if args.loss_type in ("dapo", "dr_grpo", "bnpo") else of_row)
    if args.loss_type in ("dapo", "bnpo"):
        return total / sum(int((batch["turn_ids"][i] >= 0).sum()) for i in rows)
    return total / len(rows) / (args.max_completion_length if args.loss_type == "dr_grpo" else 1)


@pytest.mark.parametrize("loss_type", ["turn", "grpo", "dapo", "dr_grpo", "bnpo"])
@pytest.mark.parametrize("level", ["turn", "sequence", "token"])
def test_every_mean_at_every_level(tmp_path: Path, tokenizer: Any, loss_type: str, level: str) -> None:
    fields = {"loss_type": loss_type, "importance_sampling_level": level, **OFF}
    trainer, batch = off_policy_batch(tmp_path, tokenizer, **fields)
    assert_same_loss(trainer, trainer._compute_loss(trainer.model, batch), reference_loss(trainer, batch))
    assert 0 < trainer._metrics["train"]["clip_ratio/region_mean"][-1] < 1


def own_objective(
    trainer: Any, logps: Tensor, log_ratio: Tensor, t: int, turn_ids: Tensor, advantage: float
) -> Tensor:
    """What the surrogate of a loss type maximises for one token."""
    args = trainer.args
    ratio = log_ratio[unit_of(t, turn_ids, args.importance_sampling_level)].mean().exp()
    if args.loss_type == "cispo":
        return ratio.detach().clamp(max=args.epsilon_high) * advantage * logps[t]
    if args.loss_type == "sapo":
        temperature = args.sapo_temperature_pos if advantage > 0 else args.sapo_temperature_neg
        return 4 / temperature * torch.sigmoid(temperature * (ratio - 1)) * advantage
    good = advantage >= 0
    power, decay = (args.vespo_k_pos, args.vespo_lambda_pos) if good else (args.vespo_k_neg, args.vespo_lambda_neg)
    of_sequence = log_ratio[turn_ids >= 0].detach().sum().exp()
    return math.exp(decay) * of_sequence**power * (-decay * of_sequence).exp() * advantage * logps[t]


@pytest.mark.parametrize("loss_type", ["turn", "dapo"])
def test_each_context_is_read_alone(tmp_path: Path, tokenizer: Any, loss_type: str) -> None:
    """Ratios, means and clip ranges are the trajectory's; log-probabilities those of each context by itself."""
    fields = {"loss_type": loss_type, "rollout_func": SeveralContexts(), "beta": 0.1, **OFF}
    trainer, batch = off_policy_batch(tmp_path, tokenizer, **fields)
    assert batch["context_ids"].min() < 0 < batch["context_ids"].max()
    assert_same_loss(trainer, trainer._compute_loss(trainer.model, batch), reference_loss(trainer, batch))


@pytest.mark.parametrize("loss_type", ["cispo", "sapo", "vespo", "luspo"])
@pytest.mark.parametrize("level", ["turn", "sequence", "token"])
def test_trls_other_losses_at_every_level(tmp_path: Path, tokenizer: Any, loss_type: str, level: str) -> None:
    cap = {"epsilon_high": 1.05} if loss_type == "cispo" else {}
    fields = {"loss_type": loss_type, "importance_sampling_level": level, **cap, **OFF}
    trainer, batch = off_policy_batch(tmp_path, tokenizer, **fields)
    logps = token_logps(trainer, batch)
    log_ratio = logps - batch["old_per_token_logps"]
    total = torch.zeros((), dtype=torch.float64)
    for i, turn_ids in enumerate(batch["turn_ids"]):
        advantage, tokens = batch["advantages"][i].item(), torch.nonzero(turn_ids >= 0).flatten().tolist()
        for t in tokens:
            if loss_type == "luspo":
                objective = token_objective(trainer, log_ratio[i], t, turn_ids, advantage)
            else:
                objective = own_objective(trainer, logps[i], log_ratio[i], t, turn_ids, advantage)
            total = total - objective / (len(tokens) if loss_type == "sapo" else 1)
    over_tokens = loss_type in ("cispo", "vespo")
    expected = total / (int((batch["turn_ids"] >= 0).sum()) if over_tokens else len(logps))
    assert_same_loss(trainer, trainer._compute_loss(trainer.model, batch), expected)


@pytest.mark.parametrize(
    "fields",
    [
        {"turn_ratio": "arithmetic"},
        {"clip_range_scaling": "sqrt_length"},
        {"clip_range_scaling": "length", "delta": 1.3},
        {"clip_range_scaling": "length", "importance_sampling_level": "sequence", "loss_type": "grpo"},
        {"epsilon_high": 0.5, "delta": 1.2},
        {"beta": 0.1},
        {"beta": 0.1, "use_bias_correction_kl": False, "loss_type": "dapo"},
    ],
    ids=str,
)
def test_ranges_ratios_and_the_reference(tmp_path: Path, tokenizer: Any, fields: dict[str, Any]) -> None:
    trainer, batch = off_policy_batch(tmp_path, tokenizer, **{**OFF, **fields})
    assert_same_loss(trainer, trainer._compute_loss(trainer.model, batch), reference_loss(trainer, batch))


def test_the_reference_is_not_asked_about_observations(tmp_path: Path, tokenizer: Any) -> None:
    """Of which it may think anything: what is infinite there would be NaN in the gradient."""
    trainer, batch = off_policy_batch(tmp_path, tokenizer, **OFF, beta=0.1)
    clean = gradient(trainer._compute_loss(trainer.model, batch), trainer)
    batch["ref_per_token_logps"] = torch.where(batch["turn_ids"] < 0, 1e3, batch["ref_per_token_logps"])
    assert torch.equal(gradient(trainer._compute_loss(trainer.model, batch), trainer), clean)


@pytest.mark.parametrize("surrogate", [DoubleSided(), MiniRL(cap=1.1)], ids=str)
@pytest.mark.parametrize("level", ["token", "turn"])
def test_every_surrogate(tmp_path: Path, tokenizer: Any, surrogate: Any, level: str) -> None:
    fields = {"importance_sampling_level": level, "loss_type": "dr_grpo", **OFF}
    trainer, batch = off_policy_batch(tmp_path, tokenizer, Method(surrogate=surrogate), **fields)
    assert_same_loss(trainer, trainer._compute_loss(trainer.model, batch), reference_loss(trainer, batch))


def test_minirl_weighs_by_the_policy_that_sampled(tmp_path: Path, tokenizer: Any) -> None:
    """Its weight is π_θ/μ: what is off by a factor of e^0.3 between trainer and engine is in it, once."""
    fields = {"importance_sampling_level": "token", "loss_type": "dr_grpo", **OFF}
    trainer, batch = off_policy_batch(tmp_path, tokenizer, METHODS["minirl"], **fields)
    plain = gradient(trainer._compute_loss(trainer.model, batch), trainer)
    batch["sampling_per_token_logps"] = batch["old_per_token_logps"] - 0.3
    ours = gradient(trainer._compute_loss(trainer.model, batch), trainer)
    torch.testing.assert_close(ours, math.exp(0.3) * plain, rtol=1e-5, atol=1e-7)
    assert METHODS["minirl"].weight == Unweighted()


@pytest.mark.parametrize("width", [1, None], ids=["sequence", "token"])
def test_the_engines_weights_multiply_the_surrogate(tmp_path: Path, tokenizer: Any, width: int | None) -> None:
    """TRL's (B, 1) and (B, T) ratios of old to sampling policy."""
    trainer, batch = off_policy_batch(tmp_path, tokenizer, loss_type="grpo", **OFF)
    shape = (8, width or batch["completion_ids"].shape[1])
    batch["importance_sampling_ratio"] = torch.rand(shape, generator=torch.Generator().manual_seed(3)) + 0.5
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    assert_same_loss(trainer, trainer._compute_loss(trainer.model, batch), reference_loss(trainer, batch))


def reference_penalty(trainer: Any, batch: dict[str, Any], piece: ClipPenalty) -> Tensor:
    log_ratio = token_logps(trainer, batch) - batch["old_per_token_logps"]
    low = trainer.args.epsilon if piece.epsilon is None else piece.epsilon
    high = low if piece.epsilon_high is None else piece.epsilon_high
    total = torch.zeros((), dtype=torch.float64)
    for i, turn_ids in enumerate(batch["turn_ids"]):
        turns = positions(turn_ids)
        logs = log_ratio[i, [*chain(*turns)]]
        ratios = {"token": logs.exp(), "turn": torch.stack([log_ratio[i, turn].mean().exp() for turn in turns])}
        gate = 1.0
        if piece.gate != "none":
            of_gate = ratios[piece.gate].detach()
            gate = float(((of_gate < 1 - low) | (of_gate > 1 + high)).double().mean())
        total = total + gate * (logs.exp() * logs - logs.exp() + 1).mean()
    return piece.coef * total / len(log_ratio)


@pytest.mark.parametrize(
    "piece",
    [
        ClipPenalty(),
        ClipPenalty(coef=3.0, epsilon=None),
        ClipPenalty(gate="turn", epsilon=0.1),
        ClipPenalty(gate="none"),
        ClipPenalty(epsilon=0.3, epsilon_high=1.0),
    ],
    ids=str,
)
def test_the_penalty(tmp_path: Path, tokenizer: Any, piece: ClipPenalty) -> None:
    trainer, batch = off_policy_batch(tmp_path, tokenizer, Method(terms=(piece,)), **OFF)
    expected = reference_loss(trainer, batch) + reference_penalty(trainer, batch, piece)
    assert_same_loss(trainer, trainer._compute_loss(trainer.model, batch), expected)
    assert trainer._metrics["train"]["clip_penalty"][-1] > 0


def test_llds_holds_up_good_trajectories(tmp_path: Path, tokenizer: Any) -> None:
    trainer, batch = off_policy_batch(tmp_path, tokenizer, Method(terms=(LLDS(coef=0.7),)), **OFF)
    log_ratio = token_logps(trainer, batch) - batch["old_per_token_logps"]
    falls, tokens = torch.zeros((), dtype=torch.float64), 0
    for i, turn_ids in enumerate(batch["turn_ids"]):
        if batch["advantages"][i] >= 0:
            tokens += int((turn_ids >= 0).sum())
            for turn in positions(turn_ids):
                fallen = -log_ratio[i, turn]
                falls = falls + (fallen.sum() > 0) * fallen.clamp(min=0).sum()
    expected = reference_loss(trainer, batch) + 0.7 * falls / tokens
    assert_same_loss(trainer, trainer._compute_loss(trainer.model, batch), expected)
    batch[OLD_POLICY_STEP] = torch.tensor(0)  # the policy that sampled has nothing to hold up
    assert_same_loss(trainer, trainer._compute_loss(trainer.model, batch), reference_loss(trainer, batch))


@pytest.mark.parametrize("loss_type", ["turn", "grpo", "dapo", "dr_grpo"])
@pytest.mark.parametrize("level", ["token", "turn"])
def test_dropped_rows_leave_loss_and_denominators(tmp_path: Path, tokenizer: Any, loss_type: str, level: str) -> None:
    method = Method(terms=(ClipPenalty(),))
    fields = {"loss_type": loss_type, "importance_sampling_level": level, **OFF}
    trainer, batch = off_policy_batch(tmp_path, tokenizer, method, **fields)
    kept = torch.tensor([True, False, True, True, False, False, True, True])
    part = {name: value[kept] if value.dim() else value for name, value in batch.items()}
    part["num_items_in_batch"] = (part["turn_ids"] >= 0).sum()
    expected = trainer._compute_loss(trainer.model, part)
    drop(batch, kept, trainer.accelerator)
    assert_same_loss(trainer, trainer._compute_loss(trainer.model, batch), expected)


def test_everything_dropped_is_a_loss_of_nothing(tmp_path: Path, tokenizer: Any) -> None:
    trainer, batch = off_policy_batch(tmp_path, tokenizer, METHODS["so_grpo"], **OFF)
    drop(batch, torch.zeros(8, dtype=torch.bool), trainer.accelerator)
    loss = trainer._compute_loss(trainer.model, batch)
    assert loss.item() == 0.0
    assert not gradient(loss, trainer).any()


def test_a_dropped_turn_leaves_the_mean_over_turns(tmp_path: Path, tokenizer: Any) -> None:
    """What is left is numbered anew: a gap would be a turn of 0 in the mean."""
    trainer, batch = off_policy_batch(tmp_path, tokenizer, **OFF)
    batch["advantages"] = batch["advantages"].unsqueeze(1).expand(batch["turn_ids"].shape).clone()
    rows = torch.nonzero(batch["turn_ids"].amax(1) > 0).flatten().tolist()
    drop(batch, batch["turn_ids"] != 0, trainer.accelerator)
    del batch["turn_counts"]
    expected = reference_loss(trainer, batch, rows)
    assert_same_loss(trainer, trainer._compute_loss(trainer.model, batch), expected)


def test_each_turn_of_a_sequence_is_moved_by_its_own_advantage(tmp_path: Path, tokenizer: Any) -> None:
    """The ratio is the sequence's; as a mean of its tokens it would move all turns by their mean advantage."""
    fields = {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 50.0, **OFF}
    trainer, batch = off_policy_batch(tmp_path, tokenizer, **fields)
    mask = batch["turn_ids"] >= 0
    batch["advantages"] = (torch.where(batch["turn_ids"] % 2 == 0, 1.5, -1.0) * mask).double()
    ours = trainer._compute_loss(trainer.model, batch)
    log_ratio = token_logps(trainer, batch) - batch["old_per_token_logps"]
    total = torch.zeros((), dtype=torch.float64)
    for row, kept, advantages in zip(log_ratio, mask, batch["advantages"], strict=True):
        tokens = row[kept]
        total = total - ((tokens.mean().detach() + tokens - tokens.detach()).exp() * advantages[kept]).mean()
    assert_same_loss(trainer, ours, total / len(log_ratio))


@pytest.mark.parametrize("log_ratio", [95.0, -95.0, math.inf])
@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
def test_no_log_ratio_makes_the_loss_infinite(tmp_path: Path, tokenizer: Any, log_ratio: float, level: str) -> None:
    trainer, batch = off_policy_batch(
        tmp_path, tokenizer, METHODS["so_grpo"], importance_sampling_level=level, loss_type="turn", **OFF
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
    fields = {"bias_norm": True, "loss_type": "grpo", "delta": delta, "max_grad_norm": 0.0, **OFF}
    trainer, batch = off_policy_batch(tmp_path, tokenizer, **fields)
    batch["advantages"] = 60.0 * batch["advantages"]  # so that the norm is above its floor of 1
    plain = gradient(reference_loss(trainer, batch), trainer)
    logps = token_logps(trainer, batch)
    bias = torch.zeros((), dtype=torch.float64)
    for i, turn_ids in enumerate(batch["turn_ids"]):
        advantage = batch["advantages"][i].item()
        for turn in positions(turn_ids):
            ratio = (logps[i] - batch["old_per_token_logps"][i])[turn].mean().exp()
            above = ratio > (1 + trainer.args.epsilon if advantage > 0 else delta or math.inf)
            if above or (advantage < 0 and ratio < 1 - trainer.args.epsilon):
                bias = bias + ratio * advantage * len(turn) / (turn_ids >= 0).sum() / 8
    norm = gradient(bias, trainer).norm().item()
    assert norm > 1
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    assert trainer._bias_normalizer.normalize(trainer.accelerator) == pytest.approx(norm, rel=1e-5)
    found = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
    torch.testing.assert_close(found, plain / norm, rtol=1e-5, atol=1e-7)


def test_the_batch_is_not_written_to(tmp_path: Path, tokenizer: Any) -> None:
    trainer, batch = off_policy_batch(tmp_path, tokenizer, METHODS["so_grpo"])
    before = {key: value.clone() for key, value in batch.items()}
    trainer._compute_loss(trainer.model, batch)
    assert batch.keys() == before.keys()
    assert all(torch.equal(batch[key], value) for key, value in before.items())
