"""LLDS in the trainers: `llds_coef` holds up the likelihood of good trajectories."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_trl import SOGRPOConfig, SOGRPOTrainer, SOPPOConfig
from sorl_trl.trainers.loss.llds import count_good_tokens
from tests.effects import TRAINERS, build_trainer, effect
from tests.losses import gradient, off_policy_batch, token_logps
from tests.training import assert_same, settings, train
from tests.trajectories import prompts

PLAIN = {"clip_normalization": "none", "num_iterations": 2}


def aged(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch as if an update had been made since it was sampled."""
    return {**batch, "generated_at_step": torch.tensor(-1)}


def reference_term(trainer: Any, batch: dict[str, Any]) -> tuple[Tensor, float]:
    """The term as a loop over turns, and the share of the good trajectories' turns whose gate is open."""
    log_ratio = token_logps(trainer, batch) - batch["old_per_token_logps"]
    total, tokens, gates = torch.zeros((), dtype=torch.float64), 0, []
    for i, turn_ids in enumerate(batch["turn_ids"]):
        kept = turn_ids >= 0
        advantages = batch["advantages"][i].expand_as(kept)[kept]
        if advantages.double().mean() < 0:
            continue
        tokens += int(kept.sum())
        for k in range(int(turn_ids.max()) + 1):
            falls = -log_ratio[i][turn_ids == k]
            gates.append(float(falls.sum() > 0))
            total = total + (falls.sum() > 0) * falls.clamp(min=0).sum()
    return total / tokens, sum(gates) / len(gates)


@pytest.mark.parametrize("per_token", [False, True], ids=["outcome", "turn_advantages"])
@pytest.mark.parametrize("loss_type", ["turn", "cispo"])
def test_value_gradient_and_metrics(tmp_path: Path, tokenizer: Any, loss_type: str, per_token: bool) -> None:
    others = {"loss_type": loss_type, "epsilon_high": 5.0, "clip_range_scaling": "none"}
    trainer, batch = off_policy_batch(tmp_path, tokenizer, llds_coef=0.7, **PLAIN, **others)
    if per_token:
        generator = torch.Generator().manual_seed(5)
        batch["advantages"] = torch.randn(batch["turn_ids"].shape, generator=generator)
        kept = batch["turn_ids"] >= 0
        good = torch.where(kept, batch["advantages"], 0.0).sum(1) >= 0
        batch["llds_tokens"] = (kept & good.unsqueeze(1)).sum()
    ours = trainer._compute_loss(trainer.model, aged(batch))
    trainer.args.llds_coef = 0.0
    without = trainer._compute_loss(trainer.model, batch)
    term, open_turns = reference_term(trainer, batch)
    assert ours.item() - without.item() == pytest.approx(0.7 * term.item(), abs=1e-6)
    difference = gradient(ours, trainer) - gradient(without, trainer)
    torch.testing.assert_close(difference, 0.7 * gradient(term, trainer), rtol=0, atol=1e-6)
    assert trainer._metrics["train"]["llds/loss"] == [pytest.approx(term.item(), abs=1e-6)]
    assert trainer._metrics["train"]["llds/open_turns"] == [pytest.approx(open_turns)]
    assert 0 < open_turns < 1


def test_the_policy_that_sampled_has_nothing_to_hold_up(tmp_path: Path, tokenizer: Any) -> None:
    """Two passes over the same tokens differ by rounding: the gate would open, with a gradient like any other."""
    trainer, batch = off_policy_batch(tmp_path, tokenizer, llds_coef=0.7, **PLAIN)
    with_term = trainer._compute_loss(trainer.model, batch)
    trainer.args.llds_coef = 0.0
    without = trainer._compute_loss(trainer.model, batch)
    assert with_term.item() == without.item()
    assert torch.equal(gradient(with_term, trainer), gradient(without, trainer))
    assert trainer._metrics["train"]["llds/loss"] == trainer._metrics["train"]["llds/open_turns"] == [0.0]


def test_with_one_update_per_rollout_it_is_idle(tmp_path: Path, tokenizer: Any) -> None:
    fields = {"num_iterations": 1, "steps_per_generation": 2, "max_steps": 2}
    runs = [
        train(SOGRPOTrainer, SOGRPOConfig, tokenizer, **settings(tmp_path, **fields, llds_coef=coef))
        for coef in (0.7, 0.0)
    ]
    assert_same(*runs, tolerance=0)


@pytest.mark.parametrize("loss_type", ["turn", "dapo"])
@pytest.mark.parametrize("split", [(4, 2), (2, 4)])
def test_gradients_do_not_depend_on_micro_batches(
    tmp_path: Path, tokenizer: Any, split: tuple[int, int], loss_type: str
) -> None:
    """Good trajectories are not spread evenly over the micro-batches: a mean of means would be another number."""
    weights, terms = [], []
    for batch_size, accumulation in ((8, 1), split):
        arguments = settings(tmp_path, llds_coef=2.0, optim="sgd", learning_rate=1.0, max_steps=2)
        arguments |= {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
        arguments |= {"steps_per_generation": accumulation, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
        trainer = train(SOGRPOTrainer, SOGRPOConfig, tokenizer, loss_type=loss_type, **arguments)
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
        terms.append(trainer.state.log_history[1]["llds/loss"])
    assert terms[0] > 0
    assert terms[0] == pytest.approx(terms[1], abs=1e-6)
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-6)


def test_tokens_are_counted_over_all_ranks() -> None:
    batch = {
        "turn_ids": torch.tensor([[0, 0, -1], [0, 1, 1], [0, -1, -1]]),
        "advantages": torch.tensor([1.0, -1.0, 0.0]),
    }
    other_rank = torch.tensor(7)
    two_ranks: Any = SimpleNamespace(gather=lambda count: torch.stack([count, other_rank]))
    count_good_tokens(batch, two_ranks)
    assert batch["llds_tokens"] == 3 + 7


@pytest.mark.parametrize("reward", [0.1, 0.8])
def test_equal_rewards_are_good_whatever_rounding_says(tmp_path: Path, tokenizer: Any, reward: float) -> None:
    """The mean of eight rewards of 0.1 is above 0.1 in float32, so that TRL's advantages are below 0."""

    def equal_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [reward] * len(completion_ids)

    given = {"reward_funcs": equal_reward, "num_generations": 8}
    of_trl = batch_of(build_trainer(tmp_path / "without", tokenizer, "SO-GRPO", **given))
    assert of_trl["advantages"].max() < 0, "nothing is rounded: a weak test"
    batch = batch_of(build_trainer(tmp_path / "with", tokenizer, "SO-GRPO", llds_coef=0.2, **given))
    assert (batch["advantages"] == 0).all()
    assert batch["llds_tokens"] == (batch["turn_ids"] >= 0).sum()


def batch_of(trainer: Any) -> dict[str, Any]:
    trainer.model.train()
    rows = [dict(row) for row in prompts(2) for _ in range(8)]
    batch: dict[str, Any] = trainer._generate_and_score_completions(rows)
    return batch


def test_a_batch_of_before_it_was_switched_on_is_left_alone(tmp_path: Path, tokenizer: Any) -> None:
    """As a resumed run may have one in its unfinished cycle."""
    trainer, batch = off_policy_batch(tmp_path, tokenizer, **PLAIN)
    without = trainer._compute_loss(trainer.model, aged(batch))
    trainer.args.llds_coef = 0.7
    assert trainer._compute_loss(trainer.model, aged(batch)).item() == without.item()


@pytest.mark.parametrize("trainer", TRAINERS)
def test_it_changes_training(tmp_path: Path, tokenizer: Any, trainer: str) -> None:
    effects = []
    for coef in (0.0, 0.2):
        built = build_trainer(tmp_path / str(coef), tokenizer, trainer, llds_coef=coef)
        generate = built._generate_and_score_completions
        built._generate_and_score_completions = lambda rows, generate=generate: aged(generate(rows))
        effects.append(effect(built))
    assert effects[0]["losses"] != effects[1]["losses"]
    assert effects[0]["gradients"] != effects[1]["gradients"]


@pytest.mark.parametrize("config_class", [SOGRPOConfig, SOPPOConfig])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_a_coefficient_is_not_negative(tmp_path: Path, config_class: Any, value: float) -> None:
    with pytest.raises(ValueError, match=f"`llds_coef` is {value}"):
        config_class(output_dir=str(tmp_path), use_cpu=True, bf16=False, llds_coef=value)
