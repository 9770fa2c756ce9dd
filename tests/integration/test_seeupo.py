"""`SeeUPOTrainer` against its method written out as a loop, and the traps on the way."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from sorl_trl import SearchRollout
from sorl_trl.experimental import SeeUPOConfig, SeeUPOTrainer
from sorl_trl.experimental.seeupo import MULTIPLIER
from sorl_trl.search import NoSearch
from tests.agents import steps_after
from tests.losses import token_logps
from tests.policies import build_policy
from tests.training import settings
from tests.trajectories import FixedRollout, Sampled, parity_reward, prompts

TURNS = 4
"""Iterations; no trajectory of `FixedRollout` has more than 3 turns."""
MINIBATCHES = 2
LEARNING_RATE = 0.5
EPSILON = 0.02
BATCHES: dict[str, Any] = {
    "num_iterations": TURNS,
    "steps_per_generation": MINIBATCHES,
    "gradient_accumulation_steps": 1,
    "per_device_train_batch_size": 8,
    "gradient_checkpointing": False,
    "model_init_kwargs": {"dtype": "auto"},
}
ONE_ROLLOUT: dict[str, Any] = {
    "max_steps": TURNS * MINIBATCHES,
    "epsilon": EPSILON,
    "optim": "sgd",
    "learning_rate": LEARNING_RATE,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
}


class Loop:
    """SeeUPO as a loop over turns, minibatches and trajectories, with an optimizer of one line.

    Of the minibatches of a trainer it reads which trajectories they have, and nothing that was computed.
    """

    def __init__(self, minibatches: list[dict[str, Any]], loss_type: str) -> None:
        self.model = build_policy().double()
        self.loss_type = loss_type
        self.minibatches = minibatches
        self.rows = [(m, i) for m, batch in enumerate(minibatches) for i in range(len(batch["completion_ids"]))]
        self.multiplier = dict.fromkeys(self.rows, 1.0)
        self.clipped = 0
        completions = [minibatches[m]["completion_ids"][i] for m, i in self.rows]
        masks = [minibatches[m]["completion_mask"][i].bool() for m, i in self.rows]
        rewards = parity_reward([ids[mask].tolist() for ids, mask in zip(completions, masks, strict=True)])
        self.rewards = dict(zip(self.rows, rewards, strict=True))

    def tokens(self, row: tuple[int, int], turn: int) -> Tensor:
        return self.minibatches[row[0]]["turn_ids"][row[1]] == turn

    def train(self) -> None:
        for turn in reversed(range(TURNS)):
            there = [row for row in self.rows if self.tokens(row, turn).any()]
            if there:
                old = self._logps()
                for minibatch in range(MINIBATCHES):
                    self._step(minibatch, turn, there, old)
                self._multiply(turn, there, old, self._logps())

    def _logps(self) -> list[Tensor]:
        return [token_logps(self, batch).detach() for batch in self.minibatches]

    def _step(self, minibatch: int, turn: int, there: list[tuple[int, int]], old: list[Tensor]) -> None:
        logps = token_logps(self, self.minibatches[minibatch])
        loss = logps.sum() * 0
        for row in there:
            if row[0] != minibatch:
                continue
            kept = self.tokens(row, turn)
            ratio = (logps[row[1]] - old[minibatch][row[1]])[kept].mean().exp()
            advantage = self.multiplier[row] * self._advantage(row, there)
            bounded = ratio.clamp(1 - EPSILON, 1 + EPSILON)
            self.clipped += int(bounded * advantage < ratio * advantage)
            weight = MINIBATCHES * self._share(row, turn, there)
            loss = loss - weight * torch.minimum(ratio * advantage, bounded * advantage)
        parameters = list(self.model.parameters())
        with torch.no_grad():
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter -= LEARNING_RATE * gradient

    def _share(self, row: tuple[int, int], turn: int, there: list[tuple[int, int]]) -> float:
        """Of a trajectory in the loss: by its tokens, or as large as the others'."""
        if self.loss_type == "dapo":
            return int(self.tokens(row, turn).sum()) / sum(int(self.tokens(other, turn).sum()) for other in there)
        return 1 / len(there)

    def _advantage(self, row: tuple[int, int], there: list[tuple[int, int]]) -> float:
        rewards = [self.rewards[other] for other in there]
        mean = math.fsum(rewards) / len(rewards)
        std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / max(len(rewards) - 1, 1))
        return min(max((self.rewards[row] - mean) / (std + 1e-6), -3.0), 3.0)

    def _multiply(self, turn: int, there: list[tuple[int, int]], old: list[Tensor], new: list[Tensor]) -> None:
        for m, i in there if turn else ():  # after turn 0 nothing depends on it
            ratio = float((new[m] - old[m])[i][self.tokens((m, i), turn)].mean().exp())
            self.multiplier[m, i] = min(max(self.multiplier[m, i] * min(max(ratio, 0.8), 1.2), 0.8), 1.2)


def build(folder: Path, tokenizer: Any, **overrides: Any) -> Any:
    """A trainer in float64: no comparison of a ratio with its range hangs on rounding."""
    build_policy().double().save_pretrained(folder / "policy")
    given = {name: overrides.pop(name) for name in ("callbacks", "method") if name in overrides}
    rollout = overrides.pop("rollout_func", None) or FixedRollout()
    return SeeUPOTrainer(
        str(folder / "policy"),
        overrides.pop("reward_funcs", parity_reward),
        SeeUPOConfig(**settings(folder, **{**BATCHES, "log_turn_details": True, **overrides})),
        prompts(),
        processing_class=tokenizer,
        rollout_func=rollout,
        **given,
    )


def run(folder: Path, tokenizer: Any, **overrides: Any) -> Any:
    trainer = build(folder, tokenizer, **overrides)
    trainer.train()
    return trainer


def updates(trainer: Any) -> list[dict[str, Any]]:
    return [log for log in trainer.state.log_history if "loss" in log]


def per_turn(turn_ids: list[list[int]], completion_ids: list[list[int]], **_: Any) -> list[list[float]]:
    """They count as what they add up to."""
    outcomes = zip(parity_reward(completion_ids), (max(turns) + 1 for turns in turn_ids), strict=True)
    return [[outcome / count] * count for outcome, count in outcomes]


@pytest.mark.parametrize(("loss_type", "reward"), [("turn", parity_reward), ("dapo", per_turn)], ids=["turn", "dapo"])
def test_it_trains_as_the_loop_does(tmp_path: Path, tokenizer: Any, loss_type: str, reward: Any) -> None:
    """On the same trajectories, as TRL shuffled and split them, whose multipliers follow them from turn to turn."""
    trainer = run(tmp_path, tokenizer, **ONE_ROLLOUT, loss_type=loss_type, reward_funcs=reward)
    loop = Loop(trainer._buffered_inputs, loss_type)
    loop.train()
    assert loop.clipped > 2, "next to nothing was clipped: a weak test"
    for ours, expected in zip(trainer.model.parameters(), loop.model.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=2e-6)
    assert (loop.model.lm_head.weight - build_policy().lm_head.weight).abs().max() > 0.1
    found = torch.cat([batch[MULTIPLIER] for batch in trainer._buffered_inputs]).double()
    multipliers = torch.tensor([loop.multiplier[row] for row in loop.rows], dtype=torch.float64)
    torch.testing.assert_close(found, multipliers, rtol=0, atol=2e-6)
    assert len({round(each, 4) for each in multipliers.tolist()}) > 5, "few can be told apart: a weak test"
    alone = [i for i, row in enumerate(loop.rows) if not loop.tokens(row, 1).any()]
    assert alone and (found[alone] == 1).all()


class Weights(TrainerCallback):
    """Keeps the policy's weights after each update."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.kept.append(torch.cat([p.detach().flatten() for p in model.parameters()]))


@pytest.mark.parametrize("options", [{}, {"beta": 0.1, "weight_decay": 0.1, "loss_type": "dapo"}], ids=["", "more"])
def test_a_turn_that_no_trajectory_has_is_no_update(tmp_path: Path, tokenizer: Any, options: dict[str, Any]) -> None:
    """Nor one by momentum: Adam has some when the second rollout comes to its absent turn."""
    weights = Weights()
    logs = updates(run(tmp_path, tokenizer, max_steps=16, callbacks=[weights], **options))
    assert len(logs) == 16
    for step, log in enumerate(logs[1:], 1):
        has_moved = not torch.equal(weights.kept[step], weights.kept[step - 1])
        assert has_moved == (log["seeupo/turn"] < 3), f"step {step}"
        assert math.isfinite(log["loss"])
    absent = [log for log in logs if log["seeupo/turn"] == 3]
    assert [log["loss"] for log in absent] == [0.0] * 4
    assert {log["entropy"] for log in absent} == {log["seeupo/multiplier_mean"] for log in absent} == {None}


def test_unscored_trajectories_are_in_no_baseline_and_get_no_advantage(tmp_path: Path, tokenizer: Any) -> None:
    def scored(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        return [None if sum(ids) % 3 == 0 else (sum(ids) % 3) - 1.0 for ids in completion_ids]

    trainer = run(tmp_path, tokenizer, max_steps=1, reward_funcs=scored)
    for batch in trainer._buffered_inputs:
        columns = (batch["completion_ids"], batch["completion_mask"].bool(), batch["advantages"])
        for ids, mask, advantages in zip(*columns, strict=True):
            [reward] = scored([ids[mask].tolist()])
            signs = set(advantages[mask].sign().tolist()) - {0.0}
            assert signs == ({None: set(), 0.0: {-1.0}, 1.0: {1.0}}[reward])


def test_a_resumed_run_goes_on_between_turns_and_within_one(tmp_path: Path, tokenizer: Any) -> None:
    """The steps 1 and 2 train the last turn, the steps 3 and 4 the one before it; then comes another rollout."""
    fields: dict[str, Any] = {"num_iterations": 3, "max_steps": 8, "save_strategy": "steps"}
    whole = run(tmp_path / "whole", tokenizer, **fields, save_steps=1, rollout_func=Sampled())
    assert min(log["seeupo/multiplier_mean"] for log in updates(whole)[4:6]) != 1.0
    for step in (2, 3):
        resumed = build(tmp_path / f"from-{step}", tokenizer, **fields, save_steps=100, rollout_func=Sampled())
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        ours, theirs = (steps_after(step, trainer.state.log_history) for trainer in (resumed, whole))
        assert ours == theirs, f"resumed after step {step}"
        for name, weight in resumed.model.state_dict().items():
            assert torch.equal(weight, whole.model.state_dict()[name]), f"{name}, resumed after step {step}"


def test_an_evaluation_is_of_all_turns_together(tmp_path: Path, tokenizer: Any) -> None:
    trainer = build(tmp_path, tokenizer, per_device_eval_batch_size=8)
    metrics = trainer.evaluate(prompts())
    assert math.isfinite(metrics["eval_loss"]) and metrics["eval_turns/per_trajectory"] > 1.5
    assert not any(name.startswith("eval_seeupo") for name in metrics)


def test_a_method_that_looks_at_several_turns_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="`credit`"):
        build(tmp_path, tokenizer, method="gigpo")


class TestTheNumberOfTurns:
    """Where more turns are possible, or are returned, than are trained."""

    def test_an_agents_is_known(self, tmp_path: Path, tokenizer: Any) -> None:
        with pytest.raises(ValueError, match="`num_iterations` is 2"):
            build(tmp_path, tokenizer, num_iterations=2, rollout_func=SearchRollout(NoSearch()))

    def test_what_a_rollout_returns_is_checked(self, tmp_path: Path, tokenizer: Any) -> None:
        with pytest.raises(ValueError, match="`num_iterations` is 2"):
            run(tmp_path, tokenizer, num_iterations=2, max_steps=1)
