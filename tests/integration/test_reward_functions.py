"""Reward functions, arguments and subclasses that `trl.GRPOTrainer` takes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import IterableDataset
from trl import GRPOConfig, GRPOTrainer

from sorl_trl import SOGRPOConfig, SOGRPOTrainer, SOPPOConfig, SOPPOTrainer
from tests.policies import build_policy
from tests.training import settings
from tests.trajectories import FixedRollout, prompts

TRAINERS = [(SOGRPOTrainer, SOGRPOConfig), (SOPPOTrainer, SOPPOConfig)]


class PlainRollout(FixedRollout):
    """Says nothing about turns, as a rollout written for TRL."""

    def __call__(self, prompts: Any, trainer: Any) -> dict[str, Any]:
        output = super().__call__(prompts, trainer)
        return {key: output[key] for key in ("prompt_ids", "completion_ids", "logprobs")}


def build(trainer_class: Any, config_class: Any, tmp_path: Path, tokenizer: Any, reward: Any, **given: Any) -> Any:
    config = config_class(**settings(tmp_path, max_steps=1, **given.pop("config", {})))
    given = {"rollout_func": PlainRollout(), "train_dataset": prompts(), **given}
    return trainer_class(build_policy(), reward, config, processing_class=tokenizer, **given)


def batch_of(trainer: Any) -> dict[str, Any]:
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
