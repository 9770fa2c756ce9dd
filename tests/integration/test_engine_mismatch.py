"""vLLM's correction per turn, and the veto, on a rollout whose log-probabilities are made up."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_trl import SOGRPOConfig, SOGRPOTrainer, SOPPOConfig, SOPPOTrainer
from sorl_trl.trainers.checks.options import idle_options
from tests.losses import gradient, token_logps
from tests.mismatch import MASK, TRUNCATE, VETO, SampledElsewhere, with_engine
from tests.training import saved_policy, settings, train
from tests.trajectories import parity_reward, prompts


def scored(folder: Path, tokenizer: Any, **overrides: Any) -> tuple[Any, dict[str, Any]]:
    """A trainer with turn ratios and the mean over turns, and its batch of 16 trajectories on policy."""
    trainer_class = overrides.pop("trainer_class", SOGRPOTrainer)
    reward = overrides.pop("reward", parity_reward)
    overrides = {"importance_sampling_level": "turn", "loss_type": "turn", **overrides}
    arguments = settings(folder, gradient_checkpointing=False, num_iterations=2, scale_rewards="none", **overrides)
    trainer = with_engine(trainer_class)(
        saved_policy(folder), reward, trainer_class.config_class(**arguments), prompts(),
        processing_class=tokenizer, rollout_func=SampledElsewhere(),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer, trainer._generate_and_score_completions([dict(row) for row in prompts(4) for _ in range(4)])


def turn_ratios(batch: dict[str, Any]) -> list[list[float]]:
    """Of each turn of each trajectory, the mean log-ratio as a ratio; a NaN counts as 0."""
    difference = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).nan_to_num(0.0)
    return [
        [float(difference[i][ids == k].double().mean().exp()) for k in range(int(ids.max()) + 1)]
        for i, ids in enumerate(batch["turn_ids"])
    ]


def reference_loss(trainer: Any, plain: dict[str, Any], weights: list[list[float]]) -> Tensor:
    """The mean over trajectories that are left, over their turns that are left; a weight of 0 is a dropped turn."""
    logps, total, rows = token_logps(trainer, plain), torch.zeros((), dtype=torch.float64), 0
    for i, of_turns in enumerate(weights):
        kept = {k: weight for k, weight in enumerate(of_turns) if weight}
        rows += bool(kept)
        for k, weight in kept.items():
            on = plain["turn_ids"][i] == k
            ratio = (logps[i] - plain["old_per_token_logps"][i])[on].mean().exp()
            total = total - weight * ratio * plain["advantages"][i].double() / len(kept)
    return total / rows


def assert_loss(trainer: Any, batch: dict[str, Any], expected: Tensor) -> None:
    loss = trainer._compute_loss(trainer.model, batch)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    torch.testing.assert_close(gradient(loss, trainer), gradient(expected, trainer), rtol=0, atol=1e-5)


def logged(trainer: Any, name: str) -> list[float]:
    values: list[float] = trainer._metrics["train"][name]
    return values


def test_turn_mask_drops_turns_out_of_the_mean(tmp_path: Path, tokenizer: Any) -> None:
    _, plain = scored(tmp_path, tokenizer, vllm_importance_sampling_mode="token_truncate")
    trainer, batch = scored(tmp_path, tokenizer, **MASK)
    ratios = turn_ratios(plain)
    weights = [[ratio if 0.8 <= ratio <= 1.25 else 0.0 for ratio in row] for row in ratios]
    dropped = sum(not weight for row in weights for weight in row) / sum(map(len, weights))
    assert 0 < dropped < 1
    assert any(not any(row) for row in weights)  # a trajectory that has lost all its turns
    assert_loss(trainer, batch, reference_loss(trainer, plain, weights))
    tokens = sum(
        int((plain["turn_ids"][i] == k).sum()) for i, row in enumerate(weights) for k, w in enumerate(row) if w
    )
    assert int(batch["num_items_in_batch"]) == tokens == int((batch["turn_ids"] >= 0).sum())
    assert logged(trainer, "mismatch/dropped_turns") == [pytest.approx(dropped)]
    of_kept = [weight for row in weights for weight in row if weight]
    for name, expected in (("min", min(of_kept)), ("mean", sum(of_kept) / len(of_kept)), ("max", max(of_kept))):
        assert logged(trainer, f"sampling/importance_sampling_ratio/{name}") == [pytest.approx(expected, rel=1e-5)]


def test_turn_truncate_cuts_weights(tmp_path: Path, tokenizer: Any) -> None:
    _, plain = scored(tmp_path, tokenizer, vllm_importance_sampling_mode="token_truncate")
    trainer, batch = scored(tmp_path, tokenizer, **TRUNCATE)
    ratios = turn_ratios(plain)
    assert_loss(
        trainer, batch, reference_loss(trainer, plain, [[min(max(r, 0.8), 1.25) for r in row] for row in ratios])
    )
    cut = [not 0.8 <= ratio <= 1.25 for row in ratios for ratio in row]
    assert logged(trainer, "mismatch/cut_weights") == [pytest.approx(sum(cut) / len(cut))]
    assert torch.equal(batch["turn_ids"], plain["turn_ids"])


def vespo_loss(trainer: Any, plain: dict[str, Any], weights: list[list[float]]) -> Tensor:
    """VESPO's: each trajectory is weighed by the product of its tokens' ratios to the policy that sampled."""
    args, logps, total, tokens = trainer.args, token_logps(trainer, plain), torch.zeros((), dtype=torch.float64), 0
    for i, of_turns in enumerate(weights):
        kept = sum((plain["turn_ids"][i] == k for k, weight in enumerate(of_turns) if weight), torch.tensor(False))
        tokens += int(kept.sum())
        moved = float((logps[i] - plain["old_per_token_logps"][i]).detach()[kept].sum()) if kept.any() else 0.0
        lengths = [int((plain["turn_ids"][i] == k).sum()) for k in range(len(of_turns))]
        moved += sum(n * math.log(weight) for n, weight in zip(lengths, of_turns, strict=True) if weight)
        advantage = float(plain["advantages"][i])
        k, rate = (
            (args.vespo_k_pos, args.vespo_lambda_pos) if advantage >= 0 else (args.vespo_k_neg, args.vespo_lambda_neg)
        )
        weight = math.exp(rate + k * moved - rate * math.exp(moved))
        total = total - weight * advantage * (logps[i][kept].sum() if kept.any() else 0.0)
    return total / tokens


@pytest.mark.parametrize("options", [MASK, TRUNCATE], ids=["mask", "truncate"])
def test_vespo_weighs_trajectories_by_their_turns(tmp_path: Path, tokenizer: Any, options: dict[str, Any]) -> None:
    vespo = {"loss_type": "vespo", "importance_sampling_level": "token"}
    vespo |= {"per_device_train_batch_size": 16, "steps_per_generation": 1, "gradient_accumulation_steps": 1}
    _, plain = scored(tmp_path, tokenizer, vllm_importance_sampling_mode="token_truncate", **vespo)
    trainer, batch = scored(tmp_path, tokenizer, **options, **vespo)
    weights = [[min(max(ratio, 0.8), 1.25) for ratio in row] for row in turn_ratios(plain)]
    if options is MASK:
        weights = [[ratio if 0.8 <= ratio <= 1.25 else 0.0 for ratio in row] for row in turn_ratios(plain)]
    generator = torch.Generator().manual_seed(7)
    noise = 0.2 * torch.randn(plain["old_per_token_logps"].shape, generator=generator)
    for each in (plain, batch):  # the ratios to vLLM are in the batch already
        each["old_per_token_logps"] = each["old_per_token_logps"] + noise
    assert_loss(trainer, batch, vespo_loss(trainer, plain, weights))


@pytest.mark.parametrize("config_class", [SOGRPOConfig, SOPPOConfig])
@pytest.mark.parametrize("mode", ["turn_mask", "turn_truncate"])
def test_a_mode_of_turns_needs_a_bound(tmp_path: Path, mode: str, config_class: Any) -> None:
    """TRL's part of the correction would fail in the first rollout."""
    given = {"use_cpu": True, "bf16": False, "vllm_importance_sampling_mode": mode}
    without = {"vllm_importance_sampling_clip_min": None, "vllm_importance_sampling_clip_max": None}
    with pytest.raises(ValueError, match=f"clip_max` are None, but `vllm_importance_sampling_mode='{mode}'` needs"):
        config_class(str(tmp_path), use_vllm=True, **given, **without)
    config_class(str(tmp_path), use_vllm=True, **given, **without | {"vllm_importance_sampling_clip_min": 0.5})
    config_class(str(tmp_path), **given, **without)  # idle without vLLM, which is said elsewhere


@pytest.mark.parametrize("mode", ["turn_truncate", "token_truncate"])
def test_the_veto_drops_trajectories(tmp_path: Path, tokenizer: Any, mode: str) -> None:
    _, plain = scored(tmp_path, tokenizer, vllm_importance_sampling_mode=mode)
    trainer, batch = scored(tmp_path, tokenizer, vllm_importance_sampling_mode=mode, mismatch_veto=0.6)
    ratios = (plain["old_per_token_logps"] - plain["sampling_per_token_logps"]).nan_to_num(0.0).exp()
    vetoed = ((ratios < 0.6) & (plain["turn_ids"] >= 0)).any(1)
    assert 0 < vetoed.float().mean() < 1
    assert torch.equal((batch["turn_ids"] >= 0).any(1), ~vetoed)
    assert logged(trainer, "mismatch/vetoed_trajectories") == [pytest.approx(vetoed.float().mean().item())]
    assert torch.equal(batch["advantages"], plain["advantages"])  # it stays in its group's baseline
    part = {name: value[~vetoed] if value.dim() else value for name, value in plain.items()}
    part["num_items_in_batch"] = (part["turn_ids"] >= 0).sum()
    ours, theirs = (trainer._compute_loss(trainer.model, each) for each in (batch, part))
    assert ours.item() == pytest.approx(theirs.item(), abs=1e-6)
    torch.testing.assert_close(gradient(ours, trainer), gradient(theirs, trainer), rtol=0, atol=1e-6)


def first_group_differs(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [reward if i < 4 else 1.0 for i, reward in enumerate(parity_reward(completion_ids))]


def test_weights_are_logged_once_for_all_rounds_of_a_refill(tmp_path: Path, tokenizer: Any) -> None:
    """TRL logs its own ratios in each round; the one per turn takes the place of all of them."""
    refill = {"group_refill": 1, "group_filter": "zero_variance", "reward": first_group_differs}
    trainer, batch = scored(tmp_path, tokenizer, **TRUNCATE, **refill)
    assert logged(trainer, "groups/refill_rounds") == [1.0]
    weights = []
    for ratios, turn_ids in zip(batch["importance_sampling_ratio"], batch["turn_ids"], strict=True):
        weights += [ratios[turn_ids == k][0].item() for k in range(int(turn_ids.max()) + 1)]
    for name, expected in (("min", min(weights)), ("mean", sum(weights) / len(weights)), ("max", max(weights))):
        assert logged(trainer, f"sampling/importance_sampling_ratio/{name}") == [pytest.approx(expected, rel=1e-5)]


@pytest.mark.parametrize("trainer_class", [SOGRPOTrainer, SOPPOTrainer])
def test_it_changes_training(tmp_path: Path, tokenizer: Any, trainer_class: Any) -> None:
    """`vllm_importance_sampling_mode` and `mismatch_veto`, in the weights after five updates."""
    weights = []
    for name, options in {
        "token": {"vllm_importance_sampling_mode": "token_truncate"},
        "mask": MASK,
        "veto": VETO,
    }.items():
        arguments = settings(tmp_path / name, **options)
        trainer = train(with_engine(trainer_class), trainer_class.config_class, tokenizer,
                        rollout_func=SampledElsewhere(), model=saved_policy(tmp_path), **arguments)  # fmt: skip
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
        assert weights[-1].isfinite().all()
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("options", [MASK, VETO], ids=["turn_mask", "veto"])
def test_gradients_do_not_depend_on_micro_batches(tmp_path: Path, tokenizer: Any, options: dict[str, Any]) -> None:
    weights = []
    for batch_size, accumulation in ((8, 1), (2, 4)):
        arguments = settings(tmp_path, optim="sgd", learning_rate=3.0, max_steps=2, **options)
        arguments |= {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
        arguments |= {"steps_per_generation": accumulation, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
        rollout = SampledElsewhere()
        trainer = train(with_engine(SOGRPOTrainer), SOGRPOConfig, tokenizer, rollout_func=rollout, **arguments)
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("config_class", [SOGRPOConfig, SOPPOConfig])
def test_refused_and_said(tmp_path: Path, config_class: Any) -> None:
    plain = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    with pytest.raises(ValueError, match="`vllm_importance_sampling_mode` is 'turn', but must be one of"):
        config_class(**plain, vllm_importance_sampling_mode="turn")
    with pytest.raises(ValueError, match=r"`mismatch_veto` is 1\.0"):
        config_class(**plain, mismatch_veto=1.0)
    for option in (MASK, VETO):
        with pytest.raises(
            ValueError, match=r"`loss_type` is 'bnpo', but `(mismatch_veto|vllm_importance_sampling_mode)"
        ):
            config_class(**plain, use_vllm=True, loss_type="bnpo", **option)
    idle = idle_options(config_class(**plain, mismatch_veto=0.1))
    assert [problem.what for problem in idle] == ["`mismatch_veto` is 0.1, but has no effect: `use_vllm` is False."]
