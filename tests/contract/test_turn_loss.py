"""The trainer's loss against the formulas of docs/paper_to_code.md, written out as loops in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from trl import GRPOTrainer

from sorl_trl import SOGRPOConfig, SOGRPOTrainer
from sorl_trl.ops import LOG_RATIO_BOUND
from tests.losses import EPSILON, gradient, off_policy_batch, token_logps
from tests.training import settings, train

pytestmark = pytest.mark.trains


def reference_loss(trainer: Any, batch: dict[str, Any], args: SOGRPOConfig) -> torch.Tensor:
    """J of SO-GRPO for one batch, trajectory by trajectory and turn by turn."""
    logps = token_logps(trainer, batch)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(len(logps)):
        turn_ids = batch["turn_ids"][i]
        spans = [torch.nonzero(turn_ids == k).flatten() for k in range(int(turn_ids.max()) + 1)]
        tokens = torch.cat(spans)
        log_ratio = logps[i] - batch["old_per_token_logps"][i]
        surrogate = reference_kl = 0.0
        for span in spans:
            geometric = args.turn_ratio == "geometric"
            ratio = log_ratio[span].mean().exp() if geometric else log_ratio[span].exp().mean()
            advantage = batch["advantages"][i].double()
            clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
            correction = batch.get("importance_sampling_ratio", torch.ones(8, 1)).expand_as(logps)[i][span].mean()
            surrogate = surrogate + correction * torch.min(ratio * advantage, clipped * advantage) / len(spans)
            if args.beta:
                difference = batch["ref_per_token_logps"][i][span] - logps[i][span]
                kl = (difference.exp() - difference - 1).sum() / len(tokens)
                reference_kl = reference_kl + (ratio * kl if args.use_bias_correction_kl else kl)
        ratios = log_ratio[tokens].exp()
        low = 1 - (EPSILON if args.ctn_epsilon is None else args.ctn_epsilon)
        own_high = args.ctn_epsilon if args.ctn_epsilon_high is None else args.ctn_epsilon_high
        high = 1 + (EPSILON if own_high is None else own_high)
        outside = ((ratios < low) | (ratios > high)).double().mean().detach()
        kl = (ratios * log_ratio[tokens] - ratios + 1).mean()
        turn_ratios = torch.stack([log_ratio[span].mean().exp() for span in spans])
        turns_outside = ((turn_ratios < low) | (turn_ratios > high)).double().mean().detach()
        gate = {"token": outside, "turn": turns_outside, "none": 1.0}[args.ctn_gate]
        total = total - surrogate + args.ctn_coef * gate * kl + args.beta * reference_kl
    return total / len(logps)


def far_off(batch: dict[str, Any], log_ratio: float) -> tuple[int, int]:
    """Move one model token with a negative advantage, whose ratio PPO's min does not bound, about `log_ratio` off."""
    row = int(batch["advantages"].argmin())
    position = int(torch.nonzero(batch["turn_ids"][row] >= 0)[0])
    batch["old_per_token_logps"][row, position] -= log_ratio
    return row, position


@pytest.mark.parametrize("turn_ratio", ["geometric", "arithmetic"])
@pytest.mark.parametrize(
    "reference_kl", [{"beta": 0.0}, {"beta": 0.1}, {"beta": 0.1, "use_bias_correction_kl": False}], ids=str
)
def test_loss_and_gradient_are_those_of_the_formula(
    tmp_path: Path, tokenizer: Any, turn_ratio: str, reference_kl: dict[str, Any]
) -> None:
    trainer, batch = off_policy_batch(tmp_path, tokenizer, turn_ratio=turn_ratio, num_iterations=2, **reference_kl)
    ours = trainer._compute_loss(trainer.model, batch)
    reference = reference_loss(trainer, batch, trainer.args)
    assert trainer._metrics["train"]["clip_fraction/turn"][-1] > 0.1
    assert ours.item() == pytest.approx(reference.item(), abs=1e-6)
    torch.testing.assert_close(gradient(ours, trainer), gradient(reference, trainer), rtol=0, atol=1e-6)


@pytest.mark.parametrize("gate", ["turn", "none"])
def test_the_penalty_can_be_gated_by_turns_or_not_at_all(tmp_path: Path, tokenizer: Any, gate: str) -> None:
    trainer, batch = off_policy_batch(tmp_path, tokenizer, num_iterations=2, ctn_gate=gate)
    ours = trainer._compute_loss(trainer.model, batch)
    assert ours.item() == pytest.approx(reference_loss(trainer, batch, trainer.args).item(), abs=1e-6)
    trainer.args.ctn_gate = "token"
    assert abs(ours.item() - reference_loss(trainer, batch, trainer.args).item()) > 1e-4


@pytest.mark.parametrize(("loss_type", "warning"), [("luspo", "should be set to"), ("dapo", "completion length")])
def test_trl_warns_by_the_level_in_use(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture, loss_type: str, warning: str
) -> None:
    """Unset, that is the sequence, which TRL recommends with 'luspo' and advises against with 'dapo'."""
    unset = {"importance_sampling_level": None, "clip_range_scaling": None, "clip_normalization": "none"}
    trainer, _ = off_policy_batch(tmp_path, tokenizer, loss_type=loss_type, **unset)
    assert (warning in caplog.text) == (loss_type == "dapo")
    assert trainer.args.importance_sampling_level is None


@pytest.mark.parametrize("scaling", ["none", "length"])
def test_at_the_sequence_level_each_turn_is_moved_by_its_own_advantage(
    tmp_path: Path, tokenizer: Any, scaling: str
) -> None:
    """The ratio is the sequence's; as a mean of its tokens it would move all turns by their mean advantage."""
    overrides: dict[str, Any] = {"importance_sampling_level": "sequence", "clip_range_scaling": scaling}
    overrides |= {"loss_type": "grpo", "clip_normalization": "none"}
    trainer, batch = off_policy_batch(tmp_path, tokenizer, num_iterations=2, **overrides)
    mask = batch["turn_ids"] >= 0
    batch["advantages"] = torch.where(batch["turn_ids"] % 2 == 0, 1.5, -1.0) * mask
    ours = trainer._compute_loss(trainer.model, batch)
    log_ratio = token_logps(trainer, batch) - batch["old_per_token_logps"]
    total = torch.zeros((), dtype=torch.float64)
    for row, kept, advantages in zip(log_ratio, mask, batch["advantages"], strict=True):
        tokens, width = row[kept], EPSILON / (int(kept.sum()) if scaling == "length" else 1)
        ratio = (tokens.mean().detach() + tokens - tokens.detach()).exp()
        unclipped, clipped = ratio * advantages[kept], ratio.clamp(1 - width, 1 + width) * advantages[kept]
        total = total - torch.min(unclipped, clipped).mean()
    reference = total / len(log_ratio)
    assert ours.item() == pytest.approx(reference.item(), abs=1e-6)
    torch.testing.assert_close(gradient(ours, trainer), gradient(reference, trainer), rtol=0, atol=1e-6)


@pytest.mark.parametrize("log_ratio", [95.0, -95.0, math.inf])
@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
@pytest.mark.parametrize("loss_type", ["turn", "dapo", "sapo", "luspo"])
def test_no_log_ratio_makes_loss_or_gradient_infinite(
    tmp_path: Path, tokenizer: Any, log_ratio: float, level: str, loss_type: str
) -> None:
    overrides = {"importance_sampling_level": level, "loss_type": loss_type, "beta": 0.1, "num_iterations": 2}
    trainer, batch = off_policy_batch(tmp_path, tokenizer, **overrides)
    far_off(batch, log_ratio)
    loss = trainer._compute_loss(trainer.model, batch)
    assert loss.isfinite()
    found = gradient(loss, trainer)
    assert found.isfinite().all()
    assert found.abs().max() > 0


def test_trls_own_loss_has_no_such_bound(tmp_path: Path, tokenizer: Any) -> None:
    """Why ours has one."""
    trainer, batch = off_policy_batch(
        tmp_path, tokenizer, importance_sampling_level="token", loss_type="grpo", num_iterations=2
    )
    far_off(batch, 95.0)
    assert not GRPOTrainer._compute_loss(trainer, trainer.model, batch).isfinite()


def test_beyond_the_bound_the_loss_is_that_at_the_bound(tmp_path: Path, tokenizer: Any) -> None:
    trainer, batch = off_policy_batch(tmp_path, tokenizer, num_iterations=2, importance_sampling_level="token")
    row, position = far_off(batch, 95.0)
    far = trainer._compute_loss(trainer.model, batch)
    logp = token_logps(trainer, batch)[row, position].detach()
    batch["old_per_token_logps"][row, position] = logp - LOG_RATIO_BOUND
    at_bound = trainer._compute_loss(trainer.model, batch)
    assert far.item() == pytest.approx(at_bound.item(), rel=1e-4)


@pytest.mark.parametrize("sides", [{"ctn_epsilon": 0.5}, {"ctn_epsilon": 0.3, "ctn_epsilon_high": 1.0}], ids=str)
@pytest.mark.parametrize("gate", ["token", "turn"])
def test_the_gate_can_have_a_range_of_its_own(
    tmp_path: Path, tokenizer: Any, gate: str, sides: dict[str, float]
) -> None:
    """The surrogate goes on to clip at `epsilon`; only what the penalty counts changes."""
    trainer, batch = off_policy_batch(tmp_path, tokenizer, num_iterations=2, ctn_gate=gate, **sides)
    ours = trainer._compute_loss(trainer.model, batch)
    assert ours.item() == pytest.approx(reference_loss(trainer, batch, trainer.args).item(), abs=1e-6)
    trainer.args.ctn_epsilon = trainer.args.ctn_epsilon_high = None
    assert abs(ours.item() - reference_loss(trainer, batch, trainer.args).item()) > 1e-4


@pytest.mark.parametrize("width", [1, None], ids=["sequence", "token"])
def test_vllm_correction_multiplies_the_surrogate(tmp_path: Path, tokenizer: Any, width: int | None) -> None:
    """TRL's (B, 1) and (B, T) ratios of old to sampling policy; what vLLM itself gives is not run here."""
    trainer, batch = off_policy_batch(tmp_path, tokenizer, num_iterations=2)
    generator = torch.Generator().manual_seed(3)
    shape = (8, width or batch["completion_ids"].shape[1])
    batch["importance_sampling_ratio"] = torch.rand(shape, generator=generator) + 0.5
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    ours, reference = trainer._compute_loss(trainer.model, batch), reference_loss(trainer, batch, trainer.args)
    assert ours.item() == pytest.approx(reference.item(), abs=1e-6)
    torch.testing.assert_close(gradient(ours, trainer), gradient(reference, trainer), rtol=0, atol=1e-6)


def test_the_batch_is_not_written_to(tmp_path: Path, tokenizer: Any) -> None:
    trainer, batch = off_policy_batch(tmp_path, tokenizer, beta=0.1, num_iterations=2)
    before = {key: value.clone() for key, value in batch.items() if isinstance(value, torch.Tensor)}
    trainer._compute_loss(trainer.model, batch)
    assert batch.keys() == before.keys()
    for key, value in before.items():
        assert torch.equal(batch[key], value), key


def test_penalty_is_zero_with_nothing_clipped(tmp_path: Path, tokenizer: Any) -> None:
    trainer, batch = off_policy_batch(tmp_path, tokenizer, num_iterations=2, epsilon=50.0, epsilon_high=50.0)
    with_penalty = trainer._compute_loss(trainer.model, batch)
    trainer.args.clip_normalization = "none"
    without = trainer._compute_loss(trainer.model, batch)
    assert with_penalty.item() == without.item()
    assert torch.equal(gradient(with_penalty, trainer), gradient(without, trainer))


def test_cispo_keeps_the_gradient_of_each_token(tmp_path: Path, tokenizer: Any) -> None:
    """CISPO is -sg(clip(w)) A log π: with a turn ratio the weight is the turn's, the gradient the token's."""
    overrides = {"loss_type": "cispo", "epsilon_high": 1.1, "clip_normalization": "none", "num_iterations": 2}
    trainer, batch = off_policy_batch(tmp_path, tokenizer, **overrides)
    ours = gradient(trainer._compute_loss(trainer.model, batch), trainer)
    logps = token_logps(trainer, batch)
    expected = torch.zeros((), dtype=torch.float64)
    for i, k in {(row, int(turn)) for row in range(8) for turn in batch["turn_ids"][row] if turn >= 0}:
        span = batch["turn_ids"][i] == k
        ratio = (logps[i] - batch["old_per_token_logps"][i])[span].mean().exp().detach().clamp(max=1.1)
        expected = expected - ratio * batch["advantages"][i].double() * logps[i][span].sum()
    expected = expected / batch["num_items_in_batch"]
    torch.testing.assert_close(ours, gradient(expected, trainer), rtol=0, atol=1e-6)


@pytest.mark.parametrize("normalization", ["kl_penalty", "bias_norm", "none"])
@pytest.mark.parametrize("split", [(4, 2), (2, 4)])
def test_gradients_do_not_depend_on_micro_batches(
    tmp_path: Path, tokenizer: Any, normalization: str, split: tuple[int, int]
) -> None:
    """Two plain SGD steps over the same eight trajectories: as one micro-batch, or as several accumulated ones."""
    weights = []
    for batch_size, accumulation in ((8, 1), split):
        arguments = settings(tmp_path, clip_normalization=normalization, optim="sgd", learning_rate=3.0, max_steps=2)
        arguments |= {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
        arguments |= {"steps_per_generation": accumulation, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
        trainer = train(SOGRPOTrainer, SOGRPOConfig, tokenizer, **arguments)
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
        assert trainer.state.log_history[1]["clip_fraction/turn"] > 0
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("delta", [None, 1.3])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "vllm_correction"])
def test_bias_norm_divides_the_gradient(tmp_path: Path, tokenizer: Any, delta: float | None, weighted: bool) -> None:
    """The gradient of the step is ∇J / max(1, ‖C‖), with C from a loop over the clipped tokens."""
    overrides = {"clip_normalization": "bias_norm", "num_iterations": 2, "scale_rewards": "none", "delta": delta}
    trainer, batch = off_policy_batch(tmp_path, tokenizer, **overrides)
    batch["advantages"] = 60.0 * batch["advantages"]  # so that the norm is above its floor of 1
    weights = torch.ones(8, 1)
    if weighted:
        weights = batch["importance_sampling_ratio"] = torch.arange(8.0).unsqueeze(1) / 4
        trainer.use_vllm = trainer.vllm_importance_sampling_correction = True
    trainer.create_optimizer()
    plain = gradient(trainer._compute_loss(trainer.model, batch), trainer)

    logps = token_logps(trainer, batch)
    bias = torch.zeros((), dtype=torch.float64)
    for i in range(8):
        turn_ids, advantage = batch["turn_ids"][i], batch["advantages"][i].double()
        for k in range(int(turn_ids.max()) + 1):
            span = turn_ids == k
            ratio = (logps[i] - batch["old_per_token_logps"][i])[span].mean().exp()
            above = ratio > (1 + EPSILON if advantage > 0 else delta or math.inf)
            if above or (advantage < 0 and ratio < 1 - EPSILON):
                lost = ratio.detach() * advantage * weights[i] * logps[i][span].sum()
                bias = bias + lost / (turn_ids >= 0).sum() / 8
    norm = gradient(bias, trainer).norm().item()
    assert norm > 1

    trainer.model.zero_grad()
    trainer._bias_normalizer._gradients = None
    trainer._prepare_inputs = lambda inputs: inputs
    trainer.accelerator.gradient_state._set_sync_gradients(True)
    trainer.training_step(trainer.model, batch, None)
    ours = torch.cat([p.grad.flatten() for p in trainer.model.parameters()]).double()
    assert trainer._metrics["train"]["clipping_bias_norm"][-1] == pytest.approx(norm, rel=1e-5)
    torch.testing.assert_close(ours, plain / norm, rtol=1e-4, atol=1e-6)


def test_without_clipping_bias_norm_is_off(tmp_path: Path, tokenizer: Any) -> None:
    arguments = settings(tmp_path, num_iterations=1, steps_per_generation=2, max_steps=2)
    trainers = [
        train(SOGRPOTrainer, SOGRPOConfig, tokenizer, **arguments, clip_normalization=normalization)
        for normalization in ("bias_norm", "none")
    ]
    for a, b in zip(*(trainer.model.parameters() for trainer in trainers), strict=True):
        assert torch.equal(a, b)
    assert trainers[0].state.log_history[0]["clipping_bias_norm"] == 0.0
    assert math.isfinite(trainers[0].state.log_history[0]["loss"])


def test_a_clip_range_that_is_changed_in_the_middle_of_a_run_counts(tmp_path: Path, tokenizer: Any) -> None:
    """As it does with TRL, which reads these attributes at each loss; and the loss leaves them as they are."""
    trainer, batch = off_policy_batch(tmp_path, tokenizer, num_iterations=2, clip_normalization="none")
    narrow = trainer._compute_loss(trainer.model, batch)
    trainer.epsilon_low = trainer.epsilon_high = 50.0
    wide = trainer._compute_loss(trainer.model, batch)
    assert abs(wide.item() - narrow.item()) > 1e-4
    assert (trainer.epsilon_low, trainer.epsilon_high, trainer.args.delta) == (50.0, 50.0, None)
    assert trainer._metrics["train"]["clip_ratio/region_mean"][-1] == 0
