"""Reward functions through the trainer: those that `trl.GRPOTrainer` takes, and rewards of turns to their tokens."""

from __future__ import annotations

import asyncio
import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import IterableDataset
from trl import GRPOConfig, GRPOTrainer

from sorl_trl import SOGRPOConfig, SOGRPOTrainer, SOPPOConfig, SOPPOTrainer
from tests.agents import build_agent, questions
from tests.policies import build_policy
from tests.training import settings
from tests.trajectories import FixedRollout, SearchDown, length_reward, parity_reward, prompts
from tests.unit.ops import reference

TRAINERS = [(SOGRPOTrainer, SOGRPOConfig), (SOPPOTrainer, SOPPOConfig)]


class PlainRollout(FixedRollout):
    """Says nothing about turns, as a rollout written for TRL."""

    def __call__(self, prompts: Any, trainer: Any) -> dict[str, Any]:
        output = super().__call__(prompts, trainer)
        return {key: output[key] for key in ("prompt_ids", "completion_ids", "logprobs")}


def build(trainer_class: Any, config_class: Any, tmp_path: Path, tokenizer: Any, reward: Any, **given: Any) -> Any:
    config = config_class(**settings(tmp_path, **{"max_steps": 1, **given.pop("config", {})}))
    given = {"rollout_func": PlainRollout(), "train_dataset": prompts(), **given}
    return trainer_class(build_policy(), reward, config, processing_class=tokenizer, **given)


def batch_of(trainer: Any) -> dict[str, Any]:
    """Of eight trajectories: two groups of four in training, four of two in evaluation."""
    batch: dict[str, Any] = trainer._generate_and_score_completions(
        [dict(row) for row in prompts(2) for _ in range(4)]
    )
    return batch


def documented(
    prompts: Any, completions: Any, completion_ids: Any, trainer_state: Any, log_extra: Any, log_metric: Any
) -> list[float]:
    """Every argument that TRL documents, and no `**kwargs`."""
    return [float(len(ids)) for ids in completion_ids]


async def documented_async(completion_ids: Any, **_: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


PLAIN: dict[str, Any] = {
    "function": documented,
    "async partial": functools.partial(documented_async),
    "tensor": lambda completion_ids, **_: torch.tensor([float(len(ids)) for ids in completion_ids]),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_functions_that_trl_takes(tmp_path: Path, tokenizer: Any, kind: str) -> None:
    theirs = build(GRPOTrainer, GRPOConfig, tmp_path, tokenizer, documented)
    ours = build(SOGRPOTrainer, SOGRPOConfig, tmp_path, tokenizer, PLAIN[kind])
    assert batch_of(ours)["advantages"].tolist() == pytest.approx(batch_of(theirs)["advantages"].tolist(), abs=1e-6)


class AllDown(FixedRollout):
    def _trajectory(self, index: int) -> tuple[list[int], list[int]]:
        ids, turns = super()._trajectory(index)
        return ids, [-1] * len(turns)


@pytest.mark.parametrize(("trainer_class", "config_class"), TRAINERS)
@pytest.mark.parametrize(("kind", "named"), [("alike", "frac_reward_zero_std"), ("down", "trajectories_without_turn")])
def test_that_nothing_can_be_learnt_is_said_once(
    tmp_path: Path, tokenizer: Any, caplog: Any, trainer_class: Any, config_class: Any, kind: str, named: str
) -> None:
    """After the sixth rollout, if rewards are alike: so are those of the first two, but not those of the third."""
    rollouts: list[int] = []

    def reward(completion_ids: Any, **_: Any) -> list[float]:
        rollouts.append(caplog.text.count(named))
        return [0.5 + (len(rollouts) == 3) * len(ids) for ids in completion_ids]

    config = {"steps_per_generation": 2, "num_iterations": 1, "max_steps": 8}
    rollout = AllDown() if kind == "down" else FixedRollout()
    trainer = build(trainer_class, config_class, tmp_path, tokenizer, reward, rollout_func=rollout, config=config)
    trainer.train()
    assert [*rollouts, caplog.text.count(named)] == ([0, *[1] * 8] if kind == "down" else [*[0] * 6, *[1] * 3])


def test_turns_go_to_functions_that_name_them(tmp_path: Path, tokenizer: Any) -> None:
    seen: dict[str, Any] = {}

    def by_name(completion_ids: Any, turn_ids: Any, **_: Any) -> list[list[float]]:
        seen["name"] = turn_ids
        return [[1.0] * (max(row) + 1) for row in turn_ids]

    def by_keyword(*, completion_ids: Any, **kwargs: Any) -> list[float]:
        seen["others"] = sorted(kwargs)
        return [0.0] * len(completion_ids)

    async def later(completion_ids: Any, turn_ids: Any, **_: Any) -> list[list[float]]:
        return by_name(completion_ids, turn_ids)

    functions = [by_name, by_keyword, functools.partial(by_name), later]
    trainer = build(SOGRPOTrainer, SOGRPOConfig, tmp_path, tokenizer, functions, rollout_func=FixedRollout())
    batch = batch_of(trainer)
    assert "turn_ids" not in seen["others"], "a function that names no such parameter is called as TRL calls it"
    assert [max(row) for row in seen["name"]] == batch["turn_ids"].max(-1).values.tolist()


def reward(completions: Any, **_: Any) -> list[float]:
    return [0.0] * len(completions)


@pytest.mark.parametrize(("trainer_class", "config_class"), TRAINERS)
def test_arguments_by_position_are_those_of_trl(
    tmp_path: Path, tokenizer: Any, trainer_class: Any, config_class: Any
) -> None:
    calls: list[int] = []

    def rollout(prompts: Any, trainer: Any) -> dict[str, Any]:
        calls.append(len(prompts))
        return PlainRollout()(prompts, trainer)

    config = config_class(**settings(tmp_path, max_steps=1))
    # model, reward_funcs, args, train_dataset, eval_dataset, processing_class, reward_processing_classes, callbacks,
    # optimizers, quantization_config, peft_config, tools, rollout_func
    others = (reward, config, prompts(), None, tokenizer, None, None, (None, None), None, None, None)
    trainer = trainer_class(build_policy(), *others, rollout)
    batch_of(trainer)
    assert calls == [8]
    with pytest.raises(ValueError, match="The rollout returned 1 rows"):  # checked, by position too
        batch_of(trainer_class(build_policy(), *others, lambda *_: {**rollout(*_), "turn_ids": [[0]]}))
    with pytest.raises(TypeError, match="model"):
        trainer_class(reward_funcs=reward)
    with pytest.raises(TypeError, match="rollouts_func"):
        trainer_class(build_policy(), reward, config, rollouts_func=rollout)


def test_a_stream_is_read_when_training_reads_it(tmp_path: Path, tokenizer: Any) -> None:
    """Opened once, from its first row on, and the one to evaluate on not before an evaluation."""
    read: list[str] = []

    def rows(name: str) -> Any:
        for i in range(16):
            read.append(f"{name} {i}")
            yield {"prompt": f"w{i} w{i + 1}"}

    train, evaluation = (IterableDataset.from_generator(rows, gen_kwargs={"name": each}) for each in ("train", "eval"))
    streams = {"train_dataset": train, "eval_dataset": evaluation}
    trainer = build(SOGRPOTrainer, SOGRPOConfig, tmp_path, tokenizer, reward, **streams)
    assert read == []
    trainer.train()
    assert read == [f"train {i}" for i in range(len(read))]
    trainer.evaluate()
    assert read.count("train 0") == read.count("eval 0") == 1


TAKEN = ("completions", "log_metric", "trajectory", "agents", "agent_rewards", "environments")


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "rows") for name in TAKEN), ("agents", "stream"), ("agents", "evaluation")]
)
def test_a_column_whose_name_is_taken_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    """Reward functions would get what the rollout has under that name."""
    rows = questions().add_column(name, ["mine"] * 8)
    given = {"eval_dataset": {"hard": rows}} if kind == "evaluation" else {"train_dataset": rows}
    if kind == "stream":
        given = {"train_dataset": rows.to_iterable_dataset()}
    with pytest.raises(ValueError, match=f"has the column '{name}', but reward functions"):
        build_agent(tmp_path, **given).train()


def test_a_column_that_a_rollout_of_ones_own_does_not_add_is_ones_own(tmp_path: Path, tokenizer: Any) -> None:
    seen: list[Any] = []

    def reward(completions: Any, agents: Any, turn_ids: Any, **_: Any) -> list[float]:
        seen.append((agents, turn_ids))
        return [0.0] * len(completions)

    rows = prompts().add_column("agents", ["mine"] * 8).add_column("turn_ids", ["mine"] * 8)
    build(SOGRPOTrainer, SOGRPOConfig, tmp_path, tokenizer, reward, train_dataset=rows).train()
    assert seen == [(["mine"] * 16, ["mine"] * 16)]


def test_rows_stay_as_they_are_and_each_trajectory_has_its_own(tmp_path: Path) -> None:
    """Also if the rows of a group are one object, which is read again."""
    seen: list[int] = []

    def reward(trajectory: Any, **_: Any) -> list[float]:
        seen.extend(map(id, trajectory))
        return [0.0] * len(trajectory)

    rows = [{"prompt": "where rome"}] * 4
    trainer = build_agent(tmp_path, reward_funcs=[reward])
    kept = [trainer._collect(rows) for _ in range(2)]
    assert rows == [{"prompt": "where rome"}] * 4 and len({*seen}) == len(seen) == 4 * len(kept)


def test_each_of_several_evaluation_sets_has_its_own_metrics(tmp_path: Path, tokenizer: Any) -> None:
    def reward(prompts: Any, log_metric: Any, **_: Any) -> list[float]:
        log_metric("length", 1.0)
        return [float(prompt == "w0 w1") for prompt in prompts]

    sets = {"easy": prompts(1), "not_easy": prompts(8).select([1])}
    config = {"eval_strategy": "steps", "num_generations_eval": 4}
    trainer = build(SOGRPOTrainer, SOGRPOConfig, tmp_path, tokenizer, reward, eval_dataset=sets, config=config)
    trainer.train()
    found = {name: value for log in trainer.state.log_history for name, value in log.items() if "eval" in name}
    assert found["eval_easy_reward"] == found["eval_easy_length"] == 1.0 and found["eval_not_easy_reward"] == 0.0
    assert not [name for name in found if not name.startswith(("eval_easy_", "eval_not_easy_"))]
    assert trainer.evaluate(prompts(1))["eval_reward"] == 1.0


def test_a_subclass_may_call_reward_functions_itself(tmp_path: Path, tokenizer: Any) -> None:
    """As TRL's may, with whatever arguments; they are the user's functions then, without turns."""

    class Own(SOGRPOTrainer):
        def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
            plain, by_position, later = self.reward_funcs
            columns = [plain(prompts=prompts, completions=completions), by_position(prompts, completions)]
            columns.append(asyncio.run(later(prompts=prompts)))
            return torch.tensor(columns).T

    async def later(prompts: Any) -> list[float]:
        return [3.0] * len(prompts)

    functions = [lambda prompts, completions: [1.0] * len(prompts), lambda a, b: [2.0] * len(b), later]
    trainer = build(Own, SOGRPOConfig, tmp_path, tokenizer, functions)
    assert trainer._collect([dict(prompts()[0])] * 4).scored.rewards_per_func.tolist() == [[1.0, 2.0, 3.0]] * 4


# ---------------------------------------------------------------------------------------------------------------------
# Rewards of turns
# ---------------------------------------------------------------------------------------------------------------------


def with_turns(tmp_path: Path, tokenizer: Any, reward: Any, rollout: Any = None, **config: Any) -> Any:
    given = {"rollout_func": rollout or FixedRollout(), "config": {"num_generations_eval": 2, **config}}
    return build(SOGRPOTrainer, SOGRPOConfig, tmp_path, tokenizer, reward, **given)


def turns_of(batch: dict[str, Any]) -> list[int]:
    return [int(row.max()) + 1 for row in batch["turn_ids"]]


def uneven(row: int, turn: int) -> float:
    """Turn rewards whose spread is ten times as large in the second half of a batch."""
    return (row * 3 % 4 + turn * turn) * (1.0 if row < 4 else 10.0)


def uneven_reward(turn_ids: list[list[int]], **_: Any) -> list[list[float]]:
    return [[uneven(row, turn) for turn in range(max(ids) + 1)] for row, ids in enumerate(turn_ids)]


def returns_of(turn_rewards: list[float], gamma: float) -> list[float]:
    turns = range(len(turn_rewards))
    return [sum(gamma ** (j - k) * turn_rewards[j] for j in turns if j >= k) for k in turns]


def assert_advantages(batch: dict[str, Any], returns: list[list[float]]) -> None:
    """Each token has its turn's; a trajectory that is not scored, without returns, is in no baseline and has none."""
    expected: list[list[float]] = []
    for group in (returns[:4], returns[4:]):
        expected += reference.group_turn_advantages(group, [[1.0] * len(row) for row in group], scale=True)
    for got, turn_ids, row in zip(batch["advantages"], batch["turn_ids"], expected, strict=True):
        values = [row[turn] if row and turn >= 0 else 0.0 for turn in turn_ids.tolist()]
        assert got.tolist() == pytest.approx(values, rel=1e-4, abs=1e-5)


class TestAdvantages:
    def test_several_functions_and_discount(self, tmp_path: Path, tokenizer: Any) -> None:
        trainer = with_turns(tmp_path, tokenizer, [uneven_reward, parity_reward], gamma=0.5, reward_weights=[3.0, 2.0])
        outcomes: list[float] = []
        trainer.reward_funcs[1] = lambda **kwargs: outcomes.extend(parity_reward(**kwargs)) or outcomes
        batch = batch_of(trainer)
        returns: list[list[float]] = []
        for row, (turns, outcome) in enumerate(zip(turns_of(batch), outcomes, strict=True)):
            turn_rewards = [3.0 * uneven(row, turn) for turn in range(turns)]
            turn_rewards[-1] += 2.0 * outcome
            returns.append(returns_of(turn_rewards, 0.5))
        assert_advantages(batch, returns)

    @pytest.mark.parametrize(("scale", "training"), [("group", True), ("batch", True), ("group", False)])
    def test_an_outcome_on_the_last_turn_has_trls_advantage(
        self, tmp_path: Path, tokenizer: Any, scale: str, training: bool
    ) -> None:
        """In the batch and in the table of completions, with some trajectories unscored."""

        def as_turns(turn_ids: Any, **kwargs: Any) -> list[list[float] | None]:
            outcomes = zip(turn_ids, length_reward(**kwargs), strict=True)
            return [None if reward is None else [0.0] * max(row) + [reward] for row, reward in outcomes]

        advantages, tables = [], []
        for reward in (length_reward, as_turns):
            trainer = with_turns(tmp_path, tokenizer, reward, scale_rewards=scale)
            trainer.model.train(training)
            batch = batch_of(trainer)
            per_token = batch["advantages"] if reward is as_turns else batch["advantages"].unsqueeze(1)
            advantages.append(torch.where(batch["turn_ids"] >= 0, per_token, 0.0))
            tables.append(list(trainer._logs["advantages"]))
        torch.testing.assert_close(*advantages, rtol=0, atol=1e-5)
        assert tables[0] == pytest.approx(tables[1], abs=1e-5)


class TestUnscored:
    @pytest.mark.parametrize("infinite", [math.inf, -math.inf])
    def test_an_infinite_reward_of_one_function_leaves_the_trajectory_out(
        self, tmp_path: Path, tokenizer: Any, infinite: float
    ) -> None:
        """As if no function had scored it: its group would have no finite mean."""

        def last(reward: float | None) -> Any:
            return lambda completions, **_: [*map(float, range(7)), reward]

        def rest(completions: Any, **_: Any) -> list[float | None]:
            return [1.0] * 7 + [None]

        advantages = []
        for functions in ([last(infinite), parity_reward], [last(None), rest]):
            trainer = with_turns(tmp_path, tokenizer, functions, reward_weights=[1.0, 0.0])
            advantages.append(batch_of(trainer)["advantages"].tolist())
            assert trainer._metrics["train"]["trajectories_unscored"] == [1 / 8]
        assert advantages[0] == pytest.approx(advantages[1]) and advantages[0][-1] == 0.0

    @pytest.mark.parametrize("reward", [100.0, [100.0] * 3], ids=str)
    def test_a_trajectory_without_a_turn_is_unscored(self, tmp_path: Path, tokenizer: Any, reward: Any) -> None:
        """Its search was down: the function may have seen turns that training does not."""

        def rewards(turn_ids: Any, **kwargs: Any) -> list[Any]:
            scored = uneven_reward(turn_ids, **kwargs)
            return [reward if max(ids) < 0 else row for ids, row in zip(turn_ids, scored, strict=True)]

        trainer = with_turns(tmp_path, tokenizer, rewards, SearchDown())
        batch = batch_of(trainer)
        assert [row for row, turns in enumerate(turns_of(batch)) if turns == 0] == [1, 6]
        returns = [
            returns_of([uneven(row, turn) for turn in range(turns)], 1.0) for row, turns in enumerate(turns_of(batch))
        ]
        assert_advantages(batch, returns)
        totals = [row[0] for row in returns if row]
        assert trainer._metrics["train"]["reward"] == [pytest.approx(sum(totals) / 6)]
        assert trainer._metrics["train"]["trajectories_without_turn"] == [0.25]
        assert trainer._metrics["train"]["trajectories_unscored"] == [0.0]
