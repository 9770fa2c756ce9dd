"""Groups without a spread are asked again with other prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset

from sorl_trl import SOGRPOTrainer
from sorl_trl.experimental import GroupRefillTrainer
from sorl_trl.ops import group_spread
from tests.distributed.cases import agreeing_reward
from tests.policies import build_policy
from tests.training import settings
from tests.trajectories import Counting, Sampled, parity_reward, prompts

GROUP = 4


def questions() -> Dataset:
    """Each prompt twice; the first four are shorter than the others."""
    rows = [{"prompt": f"w{i} w{i + 1}" + " w3" * (i > 3)} for i in range(16)]
    return Dataset.from_list([*rows, *rows])


def on_last_turn(turn_ids: list[list[int]], **given: Any) -> list[list[float]]:
    """The same rewards, as rewards of turns."""
    totals = agreeing_reward(**given)
    return [[*[0.0] * max(turns), total] for total, turns in zip(totals, turn_ids, strict=True)]


def equal_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [1.0] * len(completion_ids)


def build(folder: Path, tokenizer: Any, dataset: Any = None, **overrides: Any) -> Any:
    """A trainer whose batch is of four groups, of 16 prompts."""
    folder.mkdir(exist_ok=True)
    build_policy().save_pretrained(folder / "policy")  # the reference is loaded from there
    reward, method = overrides.pop("reward_funcs", agreeing_reward), overrides.pop("method", None)
    trainer_class = overrides.pop("trainer_class", GroupRefillTrainer)
    fields = {"num_generations": GROUP, "gradient_checkpointing": False, **overrides}
    return trainer_class(
        str(folder / "policy"), reward, trainer_class.config_class(**settings(folder, **fields)),
        dataset or questions(), processing_class=tokenizer, rollout_func=Counting(), method=method,
    )  # fmt: skip


def batch_of(folder: Path, tokenizer: Any, **overrides: Any) -> tuple[Any, dict[str, Any]]:
    """A trainer, and one batch of the groups of the first four rows."""
    trainer = build(folder, tokenizer, **overrides)
    trainer.model.train()
    rows = [dict(row) for row in trainer.train_dataset.select(range(4)) for _ in range(GROUP)]
    return trainer, trainer._generate_and_score_completions(rows)


def asked(trainer: Any) -> list[list[str]]:
    return trainer.rollout_func.asked


def numbers(tokenizer: Any, batch: dict[str, Any]) -> list[list[int]]:
    """The number of each row's prompt, group by group."""
    texts = tokenizer.batch_decode(batch["prompt_ids"], skip_special_tokens=True)
    found = [int(text.split()[0][1:]) for text in texts]
    return [found[i : i + GROUP] for i in range(0, len(found), GROUP)]


def test_slots_without_a_spread_take_groups_of_other_prompts(tmp_path: Path, tokenizer: Any) -> None:
    """The prompts 1 and 3 have no spread; there are three rounds of prompts to ask."""
    trainer, batch = batch_of(tmp_path, tokenizer, refill_rounds=8)
    groups = numbers(tokenizer, batch)
    assert all(len(set(group)) == 1 for group in groups)  # whole
    found = [group[0] for group in groups]
    assert [found[0], found[2]] == [0, 2]  # these stay
    assert len(set(found)) == len(found)  # no copies
    assert not {found[1], found[3]} & {0, 1, 2, 3}
    assert not any(number % 2 for number in found)
    assert (batch["turn_ids"] >= 0).any(1).all()  # nothing is left to drop
    of_all = [prompt for asked_then in asked(trainer) for prompt in asked_then]
    assert len(set(of_all)) == len(of_all) / GROUP  # no prompt twice
    metrics = trainer._metrics["train"]
    assert metrics["groups/refill_rounds"] == [len(asked(trainer)) - 1]
    assert metrics["groups/refilled"] == [0.5]
    assert metrics["groups/left"] == [0.0]
    assert metrics["keep/ZeroVariance"] == [1.0]
    shown = trainer._logs  # the table of TRL's `log_completions`: the rows that are trained on
    assert list(shown["prompt"]) == tokenizer.batch_decode(batch["prompt_ids"], skip_special_tokens=True)
    assert list(shown["completion"]) == tokenizer.batch_decode(batch["completion_ids"], skip_special_tokens=True)
    rewards = torch.tensor(shown["rewards"]["agreeing_reward"]).view(-1, GROUP)
    assert (rewards.std(1) > 0).all()
    torch.testing.assert_close(torch.tensor(shown["advantages"]), batch["advantages"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("reward", [agreeing_reward, on_last_turn])
def test_the_advantages_of_a_slot_are_those_of_its_group(tmp_path: Path, tokenizer: Any, reward: Any) -> None:
    """The rewards less their mean, whether TRL computes it or, with rewards of turns, the method's credit."""
    _, batch = batch_of(tmp_path, tokenizer, reward_funcs=reward, refill_rounds=8, scale_rewards="none")
    masks = batch["completion_mask"].bool()
    rewards = parity_reward([ids[mask].tolist() for ids, mask in zip(batch["completion_ids"], masks, strict=True)])
    of_groups = torch.tensor(rewards).view(-1, GROUP)
    expected = (of_groups - of_groups.mean(1, keepdim=True)).flatten()
    assert (batch["advantages"].dim() == 2) == (reward is on_last_turn)
    advantages = batch["advantages"].view(len(rewards), -1)[:, 0]
    torch.testing.assert_close(advantages, expected, rtol=0, atol=1e-6)
    assert (group_spread(advantages, GROUP) > 1e-3).all()


def test_the_spread_of_a_batch_is_that_of_the_groups_that_are_trained_on(tmp_path: Path, tokenizer: Any) -> None:
    trainer, batch = batch_of(tmp_path, tokenizer, refill_rounds=8, scale_rewards="batch")
    rewards = torch.tensor(trainer._logs["rewards"]["agreeing_reward"])
    expected = (rewards - rewards.view(-1, GROUP).mean(1).repeat_interleave(GROUP)) / (rewards.std() + 1e-4)
    torch.testing.assert_close(batch["advantages"], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("most", "rounds"), [(0, 0), (1, 1), (8, 3)])
def test_the_bound_leaves_the_rest_to_the_method(tmp_path: Path, tokenizer: Any, most: int, rounds: int) -> None:
    """After three rounds there is no other prompt to ask."""
    trainer, batch = batch_of(tmp_path, tokenizer, reward_funcs=equal_reward, refill_rounds=most)
    assert len(asked(trainer)) == 1 + rounds
    assert (batch["turn_ids"] == -1).all()
    metrics = trainer._metrics["train"]
    assert (metrics["groups/refill_rounds"], metrics["groups/left"]) == ([rounds], [1.0])


def test_rows_with_the_same_prompt_are_different_tasks(tmp_path: Path, tokenizer: Any) -> None:
    """As with an agent, which reads other columns."""
    tasks = Dataset.from_list([{"prompt": "w1", "task": i} for i in range(8)])
    trainer, _ = batch_of(tmp_path, tokenizer, dataset=tasks, reward_funcs=equal_reward, refill_rounds=8)
    assert len(asked(trainer)) == 2


def test_a_batch_that_needs_none_is_that_of_a_trainer_without(tmp_path: Path, tokenizer: Any) -> None:
    given = {"reward_funcs": parity_reward, "method": {"keep": "zero_variance"}}
    (_, plain), (_, filled) = (
        batch_of(tmp_path / each.__name__, tokenizer, trainer_class=each, **given)
        for each in (SOGRPOTrainer, GroupRefillTrainer)
    )
    assert plain.keys() == filled.keys()
    assert all(torch.equal(filled[name], x) for name, x in plain.items())


def test_an_evaluation_asks_once(tmp_path: Path, tokenizer: Any) -> None:
    trainer = build(tmp_path, tokenizer, reward_funcs=equal_reward)
    trainer.model.eval()
    trainer._generate_and_score_completions([dict(row) for row in prompts(2) for _ in range(GROUP)])
    assert len(asked(trainer)) == 1


def long_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids) > 5) for ids in completion_ids]


def sampling_trainer(folder: Path, tokenizer: Any, **overrides: Any) -> Any:
    """A rollout for every two optimizer steps."""
    fields = {"per_device_train_batch_size": 4, "num_generations": 2, "max_steps": 6, "num_iterations": 1}
    fields |= {"steps_per_generation": 2, "gradient_accumulation_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = build(folder, tokenizer, reward_funcs=long_reward, **{**fields, **overrides})
    trainer.rollout_func = Sampled()
    return trainer


def test_a_resumed_run_asks_the_same(tmp_path: Path, tokenizer: Any) -> None:
    whole = sampling_trainer(tmp_path / "whole", tokenizer)
    whole.train()
    logs = [log for log in whole.state.log_history if "groups/refilled" in log]
    assert max(log["groups/refilled"] for log in logs) > 0
    rounds = len(whole.rollout_func.asked)
    for step in (3, 4):  # within a rollout and at the end of one
        resumed = sampling_trainer(tmp_path / f"from-{step}", tokenizer, save_steps=100)
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        found = resumed.rollout_func.asked
        assert len(found) > 1 and found == whole.rollout_func.asked[rounds - len(found) :]
        for name, weight in resumed.model.state_dict().items():
            assert torch.equal(weight, whole.model.state_dict()[name]), f"{name}, resumed after step {step}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dataset": prompts(7)}, "`train_dataset` has 7"),
        ({"dataset": IterableDataset.from_generator(lambda: iter(prompts()))}, "`train_dataset`"),
        ({"dataset": Dataset.from_list([{"prompt": "w1", "image": "a.png"}] * 8)}, "`train_dataset`"),
        ({"method": "grpo"}, "ZeroVariance"),
    ],
    ids=["few", "stream", "images", "method"],
)
def test_what_cannot_be_refilled_is_refused(
    tmp_path: Path, tokenizer: Any, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(tmp_path, tokenizer, **given)
