"""Groups without a spread are asked again with other prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset

from sorl_trl import SOGRPOConfig, SOGRPOTrainer
from sorl_trl.ops import group_spread
from tests.agents import NAMES, agent_policy, agent_tokenizer, steps_after
from tests.effects import ROWS, build_trainer
from tests.losses import token_logps
from tests.training import settings
from tests.trajectories import Counting, parity_reward, prompts

GROUP = 4
FILTER = {"group_filter": "zero_variance", "num_generations": GROUP}


def differing_reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Equal in the groups of every other prompt."""
    rewards = parity_reward(completion_ids)
    return [0.5 if int(prompt.split()[0][1:]) % 2 else r for prompt, r in zip(prompts, rewards, strict=True)]


def equal_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [1.0] * len(completion_ids)


def batch_of(folder: Path, tokenizer: Any, **overrides: Any) -> tuple[Any, dict[str, Any]]:
    """A trainer of 16 prompts, and one batch of the groups of the first four."""
    trainer = build_trainer(folder, tokenizer, "SO-GRPO", **{**FILTER, **overrides})
    trainer.rollout_func = Counting()
    trainer.model.train()
    rows = [dict(row) for row in prompts(ROWS // GROUP) for _ in range(GROUP)]
    return trainer, trainer._generate_and_score_completions(rows)


def numbers(tokenizer: Any, batch: dict[str, Any]) -> list[list[int]]:
    """The number of each row's prompt, group by group."""
    texts = tokenizer.batch_decode(batch["prompt_ids"], skip_special_tokens=True)
    found = [int(text.split()[0][1:]) for text in texts]
    return [found[i : i + GROUP] for i in range(0, len(found), GROUP)]


def test_slots_without_a_spread_take_groups_of_other_prompts(tmp_path: Path, tokenizer: Any) -> None:
    """`group_refill`: the prompts 1 and 3 have no spread; there are three rounds of prompts to ask."""
    trainer, batch = batch_of(tmp_path, tokenizer, reward_funcs=differing_reward, group_refill=8)
    found = numbers(tokenizer, batch)
    assert all(len(set(group)) == 1 for group in found)  # whole
    asked = [group[0] for group in found]
    assert [asked[0], asked[2]] == [0, 2]  # these stay
    assert len(set(asked)) == len(asked)  # no copies
    assert not {asked[1], asked[3]} & {0, 1, 2, 3}
    assert not any(number % 2 for number in asked)
    assert (batch["turn_ids"] >= 0).any(1).all()  # nothing is left to the filter
    rounds = trainer.rollout_func.asked
    assert 2 <= len(rounds) <= 4
    of_all = [prompt for asked_then in rounds for prompt in asked_then]
    assert len(set(of_all)) == len(of_all) / GROUP  # no prompt twice
    metrics = trainer._metrics["train"]
    assert metrics["groups/refill_rounds"] == [len(rounds) - 1]
    assert metrics["groups/refilled"] == [0.5]
    assert metrics["groups/left"] == [0.0]
    assert metrics["groups/kept"] == [1.0]


def test_rows_of_several_rounds_are_one_batch(tmp_path: Path, tokenizer: Any) -> None:
    """Prompts of different lengths, wide and narrow completions: the old log-probabilities are those of the tokens."""
    trainer, batch = batch_of(tmp_path, tokenizer, reward_funcs=differing_reward, group_refill=8, beta=0.1)
    kept = batch["turn_ids"] >= 0
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        expected = token_logps(trainer, batch).detach().float()
        torch.testing.assert_close(batch[name][kept], expected[kept], rtol=0, atol=1e-5)
    assert batch["num_items_in_batch"] == kept.sum()
    assert batch["turn_counts"].tolist() == (batch["turn_ids"].amax(1) + 1).tolist()
    trainer.current_gradient_accumulation_steps = 1
    assert trainer._compute_loss(trainer.model, batch).isfinite()


def test_the_rewards_of_a_slot_are_those_of_its_group(tmp_path: Path, tokenizer: Any) -> None:
    """TRL's advantages are the rewards less their mean, over a spread that every group has now."""
    _, batch = batch_of(tmp_path, tokenizer, reward_funcs=differing_reward, group_refill=8, scale_rewards="none")
    advantages = batch["advantages"].view(-1, GROUP)
    torch.testing.assert_close(advantages.sum(1), torch.zeros(4), rtol=0, atol=1e-6)
    assert (group_spread(batch["advantages"], GROUP) > 1e-3).all()


@pytest.mark.parametrize(("most", "rounds"), [(1, 1), (8, 3)])
def test_the_cap_leaves_the_rest_to_the_filter(tmp_path: Path, tokenizer: Any, most: int, rounds: int) -> None:
    """After three rounds there is no other prompt to ask."""
    trainer, batch = batch_of(tmp_path, tokenizer, reward_funcs=equal_reward, group_refill=most)
    assert len(trainer.rollout_func.asked) == 1 + rounds
    assert (batch["turn_ids"] == -1).all()
    metrics = trainer._metrics["train"]
    assert (metrics["groups/refill_rounds"], metrics["groups/left"]) == ([rounds], [1.0])


def test_a_batch_that_needs_none_is_that_of_a_run_without(tmp_path: Path, tokenizer: Any) -> None:
    batches = [batch_of(tmp_path / str(most), tokenizer, group_refill=most)[1] for most in (0, 2)]
    assert batches[0].keys() == batches[1].keys()
    assert all(torch.equal(batches[1][name], x) for name, x in batches[0].items())


def test_an_evaluation_asks_once(tmp_path: Path, tokenizer: Any) -> None:
    trainer, _ = batch_of(tmp_path, tokenizer, group_refill=2)
    trainer.rollout_func, trainer.reward_funcs = Counting(), [equal_reward]
    trainer.model.eval()
    trainer._generate_and_score_completions([dict(row) for row in prompts(2) for _ in range(GROUP)])
    assert len(trainer.rollout_func.asked) == 1


def long_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids) > 5) for ids in completion_ids]


def sampling_trainer(folder: Path, **overrides: Any) -> SOGRPOTrainer:
    """Real sampling, a rollout for every two optimizer steps."""
    folder.mkdir(exist_ok=True)
    rows = [{"prompt": f"{first} {second}"} for first in NAMES[:4] for second in NAMES[:4]]
    fields = {"per_device_train_batch_size": 4, "num_generations": 2, "max_completion_length": 8, "max_steps": 6}
    fields |= {"num_iterations": 1, "steps_per_generation": 2, "gradient_accumulation_steps": 1, "seed": 3}
    fields |= {"group_filter": "zero_variance", "group_refill": 2, "save_strategy": "steps", "save_steps": 1}
    return SOGRPOTrainer(
        agent_policy(), long_reward, SOGRPOConfig(**settings(folder, **{**fields, **overrides})),
        Dataset.from_list(rows), processing_class=agent_tokenizer(),
    )  # fmt: skip


def test_a_resumed_run_asks_the_same(tmp_path: Path) -> None:
    whole = sampling_trainer(tmp_path / "whole")
    whole.train()
    logs = [log for log in whole.state.log_history if "groups/refilled" in log]
    assert max(log["groups/refilled"] for log in logs) > 0
    for step in (3, 4):  # within a rollout and at the end of one
        resumed = sampling_trainer(tmp_path / f"from-{step}", save_steps=100)
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert steps_after(step, resumed.state.log_history) == steps_after(step, whole.state.log_history)
        for name, weight in resumed.model.state_dict().items():
            assert torch.equal(weight, whole.model.state_dict()[name]), f"{name}, resumed after step {step}"


class TestWhatIsRefused:
    def test_a_dataset_without_other_prompts(self, tmp_path: Path, tokenizer: Any) -> None:
        given = {"group_refill": 1, "per_device_train_batch_size": 16, **FILTER}
        with pytest.raises(ValueError, match=r"has 16 prompts and a rollout takes 16: .* 32 in all"):
            build_trainer(tmp_path, tokenizer, "SO-GRPO", **given)

    def test_a_stream(self, tmp_path: Path, tokenizer: Any) -> None:
        config = SOGRPOConfig(**settings(tmp_path, group_refill=1, **FILTER))
        stream = IterableDataset.from_generator(lambda: iter(prompts()))
        with pytest.raises(ValueError, match="is of type IterableDataset, which gives no prompts out of turn"):
            SOGRPOTrainer(agent_policy(), parity_reward, config, stream, processing_class=tokenizer)
