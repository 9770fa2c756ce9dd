"""`SeeUPOTrainer` against its method written out as a loop, and the traps on the way."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback

from sorl_trl import SearchRollout, SeeUPOConfig, SeeUPOTrainer
from sorl_trl.search import NoSearch
from sorl_trl.trainers.turns.backward import MULTIPLIER
from tests.agents import agent_policy, build_agent, native_agent, questions
from tests.backward_loop import EPSILON, LEARNING_RATE, MINIBATCHES, TURNS, Loop
from tests.policies import build_policy
from tests.tools import QUESTION, lookup, qwen_tokenizer, scripted
from tests.training import saved_policy, settings, train
from tests.trajectories import FixedRollout, parity_reward, prompts

BATCHES: dict[str, Any] = {
    "num_iterations": TURNS,
    "steps_per_generation": MINIBATCHES,
    "gradient_accumulation_steps": 1,
    "per_device_train_batch_size": 8,
    "gradient_checkpointing": False,
}
ONE_ROLLOUT: dict[str, Any] = {
    **BATCHES,
    "max_steps": TURNS * MINIBATCHES,
    "epsilon": EPSILON,
    "optim": "sgd",
    "learning_rate": LEARNING_RATE,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
}


def run(folder: Path, tokenizer: Any, **overrides: Any) -> Any:
    return train(SeeUPOTrainer, SeeUPOConfig, tokenizer, **settings(folder, **{**BATCHES, **overrides}))


def updates(trainer: Any) -> list[dict[str, Any]]:
    return [log for log in trainer.state.log_history if "loss" in log]


@pytest.fixture(params=["grpo", "dapo"])
def both(tmp_path: Path, tokenizer: Any, request: pytest.FixtureRequest) -> tuple[Any, Loop]:
    """A trainer after one rollout, and the loop over the same trajectories, as TRL shuffled and split them."""
    trainer = run(tmp_path, tokenizer, **ONE_ROLLOUT, loss_type=request.param)
    loop = Loop(trainer._buffered_inputs, request.param)
    loop.train()
    return trainer, loop


def test_it_trains_as_the_loop_does(both: tuple[Any, Loop]) -> None:
    trainer, loop = both
    assert loop.clipped > 2, "next to nothing was clipped: a weak test"
    for ours, expected in zip(trainer.model.parameters(), loop.model.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=2e-6)
    assert (loop.model.lm_head.weight - build_policy().lm_head.weight).abs().max() > 0.1


def test_the_multiplier_follows_its_trajectory(both: tuple[Any, Loop]) -> None:
    """Through TRL's shuffle, into micro-batches, from turn to turn."""
    trainer, loop = both
    found = torch.cat([batch[MULTIPLIER] for batch in trainer._buffered_inputs])
    expected = torch.tensor([loop.multiplier[row] for row in loop.rows])
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    assert len({round(each, 4) for each in expected.tolist()}) > 5, "few trajectories can be told apart: a weak test"
    alone = [i for i, row in enumerate(loop.rows) if not loop.tokens(row, 1).any()]
    assert alone and (found[alone] == 1).all()


def test_each_turn_starts_from_the_policy_as_it_is(tmp_path: Path, tokenizer: Any) -> None:
    """In the first update of a turn every ratio is 1; in the next, on other trajectories, it is not."""
    logs = [log for log in updates(run(tmp_path, tokenizer, max_steps=16)) if log["seeupo/trajectories_with_turn"]]
    assert [log["seeupo/turn"] for log in logs] == [2, 2, 1, 1, 0, 0] * 2
    assert [log["off_policy_age"] for log in logs] == [0, 1] * 6
    for first, second in zip(logs[::2], logs[1::2], strict=True):
        assert first["turns/ratio_min"] == pytest.approx(1.0, abs=1e-6)
        assert first["turns/ratio_max"] == pytest.approx(1.0, abs=1e-6)
        assert first["clip_fraction/token"] == first["clip_fraction/turn"] == first["clip_ratio/region_mean"] == 0
        assert abs(second["turns/ratio_max"] - 1) > 1e-5


class Weights(TrainerCallback):
    """Keeps the policy's weights after each update."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.kept.append(torch.cat([p.detach().flatten() for p in model.parameters()]))


@pytest.mark.parametrize("options", [{}, {"beta": 0.1, "weight_decay": 0.1, "loss_type": "dapo"}], ids=["", "more"])
def test_a_turn_that_nobody_has_is_no_update(tmp_path: Path, tokenizer: Any, options: dict[str, Any]) -> None:
    """Nor one by momentum: Adam has some when the second rollout comes to its absent turn."""
    weights = Weights()
    arguments = settings(tmp_path, **{**BATCHES, "max_steps": 16, **options})
    trainer = SeeUPOTrainer(
        saved_policy(tmp_path), parity_reward, SeeUPOConfig(**arguments), prompts(), processing_class=tokenizer,
        rollout_func=FixedRollout(), callbacks=[weights],
    )  # fmt: skip
    trainer.train()
    logs = updates(trainer)
    assert len(logs) == 16
    for step, log in enumerate(logs[1:], 1):
        has_moved = not torch.equal(weights.kept[step], weights.kept[step - 1])
        assert has_moved == (log["seeupo/turn"] < 3), f"step {step}"
        assert math.isfinite(log["loss"])
    absent = [log for log in logs if log["seeupo/turn"] == 3]
    assert [log["loss"] for log in absent] == [0.0] * 4
    assert {log["entropy"] for log in absent} == {log["seeupo/multiplier_mean"] for log in absent} == {None}


def test_a_batch_without_any_turn_trains_nothing(tmp_path: Path, tokenizer: Any) -> None:
    """All trajectories are cut off, and masked: none counts, in no turn."""
    trainer = run(tmp_path, tokenizer, max_steps=4, mask_truncated_completions=True, rollout_func=CutOff())
    assert {log["loss"] for log in updates(trainer)} == {0.0}
    for ours, before in zip(trainer.model.parameters(), build_policy().parameters(), strict=True):
        assert torch.equal(ours, before)


class CutOff(FixedRollout):
    """No trajectory comes to its end."""

    def _trajectory(self, index: int) -> tuple[list[int], list[int]]:
        ids, turns = super()._trajectory(index)
        return ([*ids[:-1], 4], turns) if ids[-1] == 1 else (ids, turns)


def test_unscored_trajectories_are_in_no_baseline_and_get_no_advantage(tmp_path: Path, tokenizer: Any) -> None:
    def scored(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        return [None if sum(ids) % 3 == 0 else (sum(ids) % 3) - 1.0 for ids in completion_ids]

    trainer = run(tmp_path, tokenizer, max_steps=1, reward_funcs=scored)
    for batch in trainer._buffered_inputs:
        for ids, mask, advantages in zip(
            batch["completion_ids"], batch["completion_mask"].bool(), batch["advantages"], strict=True
        ):
            [reward] = scored([ids[mask].tolist()])
            signs = set(advantages[mask].sign().tolist()) - {0.0}
            assert signs == ({None: set(), 0.0: {-1.0}, 1.0: {1.0}}[reward])


def test_turn_rewards_count_as_what_they_add_up_to(tmp_path: Path, tokenizer: Any) -> None:
    def per_turn(turn_ids: list[list[int]], completion_ids: list[list[int]], **_: Any) -> list[list[float]]:
        counts = [max(turns) + 1 for turns in turn_ids]
        outcomes = parity_reward(completion_ids)
        return [[outcome / n] * n for n, outcome in zip(counts, outcomes, strict=True)]

    one, other = (
        run(tmp_path / name, tokenizer, max_steps=1, reward_funcs=func)
        for name, func in (("turns", per_turn), ("outcome", parity_reward))
    )
    for ours, theirs in zip(one._buffered_inputs, other._buffered_inputs, strict=True):
        torch.testing.assert_close(ours["advantages"], theirs["advantages"], rtol=0, atol=1e-5)


class TestOptions:
    @pytest.mark.parametrize(
        "option",
        [
            {"clip_range_scaling": "length"},
            {"target_kl": 1e-4},
            {"loss_type": "dr_grpo"},
            {"beta": 0.5},
            {"epsilon": 0.01},
        ],
        ids=str,
    )
    def test_it_makes_a_difference(self, tmp_path: Path, tokenizer: Any, option: dict[str, Any]) -> None:
        usual, changed = (
            run(tmp_path / name, tokenizer, **{"max_steps": 8, "epsilon": 0.05, **given})
            for name, given in (("usual", {}), ("changed", option))
        )
        assert not torch.equal(usual.model.lm_head.weight, changed.model.lm_head.weight)

    def test_gradient_accumulation_changes_nothing(self, tmp_path: Path, tokenizer: Any) -> None:
        """Half the micro-batch, twice as many: a micro-batch may have the turn not at all."""
        weights = []
        for name, size, accumulation in (("whole", 16, 1), ("split", 2, 8)):
            arguments = {"per_device_train_batch_size": size, "gradient_accumulation_steps": accumulation}
            arguments |= {"steps_per_generation": accumulation, "max_steps": TURNS}
            trainer = run(tmp_path / name, tokenizer, **{**ONE_ROLLOUT, **arguments})
            weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
        torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=2e-5)


class TestTheLimitOfTurns:
    def test_an_agents_is_known(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"`num_iterations` is 2, but must be 3, .*`max_turns` 2, and a last"):
            build_agent(tmp_path, NoSearch(), SeeUPOTrainer, num_iterations=2)

    def test_an_agents_default_is_known(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="but must be 3"):
            SeeUPOTrainer(
                agent_policy(),
                parity_reward,
                SeeUPOConfig(**settings(tmp_path, num_iterations=4)),
                rollout_func=SearchRollout(NoSearch()),
            )

    def test_without_tools_there_is_one(self, tmp_path: Path) -> None:
        with pytest.raises(
            ValueError, match=r"`num_iterations` is 2, but must be 1, .*no tools and no `rollout_func`"
        ):
            native_agent(tmp_path, agent_policy(), SeeUPOTrainer)

    @pytest.mark.parametrize(
        ("calls", "said"),
        [(None, "`max_tool_calling_iterations` is None, but SeeUPO needs a limit"), (2, "is 2, but must be 3")],
    )
    def test_tools_have_theirs(self, tmp_path: Path, calls: int | None, said: str) -> None:
        arguments = settings(tmp_path, max_tool_calling_iterations=calls)
        with pytest.raises(ValueError, match=said):
            SeeUPOTrainer(agent_policy(), parity_reward, SeeUPOConfig(**arguments), tools=[lambda: "nothing"])

    def test_what_a_rollout_returns_is_checked(self, tmp_path: Path, tokenizer: Any) -> None:
        with pytest.raises(ValueError, match="`num_iterations` is 2, but must be 3 or more: a trajectory has 3 turns"):
            run(tmp_path, tokenizer, num_iterations=2, max_steps=1)


def test_an_agent_learns_and_evaluates(tmp_path: Path) -> None:
    """End to end, with sampling, a search engine and an evaluation, whose loss is that of all turns together."""
    options = {"num_iterations": 3, "max_steps": 12, "learning_rate": 1e-2, "eval_strategy": "steps", "eval_steps": 6}
    trainer = build_agent(
        tmp_path, None, SeeUPOTrainer, **options, eval_dataset=questions(8), per_device_eval_batch_size=4
    )
    trainer.train()
    assert [log["seeupo/turn"] for log in updates(trainer)] == [2, 2, 1, 1, 0, 0] * 2
    evaluations = [log for log in trainer.state.log_history if "eval_loss" in log]
    assert len(evaluations) == 2 and all(math.isfinite(log["eval_loss"]) for log in evaluations)
    assert not any(name.startswith("eval_seeupo") for log in evaluations for name in log)


def test_trls_tool_loop(tmp_path: Path) -> None:
    """Every other trajectory calls the tool, and has a second turn."""
    tokenizer = qwen_tokenizer()
    arguments = {**BATCHES, "num_iterations": 2, "max_tool_calling_iterations": 1, "max_completion_length": 512}
    trainer = SeeUPOTrainer(
        build_policy(vocab_size=len(tokenizer)),
        parity_reward,
        SeeUPOConfig(**settings(tmp_path, **{**arguments, "per_device_train_batch_size": 4, "max_steps": 4})),
        Dataset.from_list([{"prompt": QUESTION}] * 8),
        processing_class=tokenizer,
        tools=[lookup],
    )
    trainer._generate_single_turn = scripted(tokenizer)
    trainer.train()
    logs = updates(trainer)
    assert [log["seeupo/turn"] for log in logs] == [1, 1, 0, 0]
    shares = [log["seeupo/trajectories_with_turn"] for log in logs]
    assert (sum(shares[:2]) / 2, *shares[2:]) == (0.5, 1.0, 1.0)


def test_a_roll_back_in_the_middle_of_a_turn_goes_on_with_new_trajectories(tmp_path: Path) -> None:
    class RollsBack(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 9:
                trainer.roll_back(tmp_path / "checkpoint-6")

    trainer = build_agent(
        tmp_path, None, SeeUPOTrainer, num_iterations=3, max_steps=12, save_strategy="steps", save_steps=6
    )
    trainer.add_callback(RollsBack())
    trainer.train()
    logs = updates(trainer)
    assert [log["seeupo/turn"] for log in logs] == [2, 2, 1, 1, 0, 0] * 2
    assert logs[9]["off_policy_age"] == 0 and "reward" in logs[9]
    assert logs[9]["turns/ratio_max"] == pytest.approx(1.0, abs=1e-5)
