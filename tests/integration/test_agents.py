"""Several agents that share the policy, and several contexts: from a rollout to what is trained on, shown and told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sorl_trl import SOGRPOTrainer
from sorl_trl.experimental import GroupRefillTrainer
from sorl_trl.records.trained import read_trained
from sorl_trl.records.view import training_entry
from sorl_trl.rollout.policy_rollout import rollout_output
from sorl_trl.rollout.trajectories import closed
from tests.distributed.cases import agreeing_reward
from tests.policies import build_policy
from tests.training import settings
from tests.trajectories import FixedRollout, SeveralContexts, Team, parity_reward, prompts
from tests.unit.evaluation.trajectories import TWO_AGENTS

pytestmark = pytest.mark.trains


def build(folder: Path, tokenizer: Any, rollout: Any, trainer_class: Any = SOGRPOTrainer, **overrides: Any) -> Any:
    reward, method = overrides.pop("reward_funcs", parity_reward), overrides.pop("method", None)
    torch.manual_seed(0)
    return trainer_class(
        build_policy(), reward, trainer_class.config_class(**settings(folder, **overrides)), prompts(),
        processing_class=tokenizer, rollout_func=rollout, method=method,
    )  # fmt: skip


def rows(trainer: Any, count: int = 8) -> list[dict[str, Any]]:
    trainer.model.train()
    return [dict(trainer.train_dataset[i // 4]) for i in range(count)]


def test_every_turn_has_its_agent_though_it_was_masked_because_it_was_cut(tmp_path: Path, tokenizer: Any) -> None:
    """As in GRPO, whose mean and spread are those of all trajectories."""

    class Cut(Team):
        def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
            output = super().__call__(prompts, trainer)
            output["completion_ids"][2][-1] = 9
            return output

    trainer = build(tmp_path, tokenizer, Cut(("searcher", "planner")), mask_truncated_completions=True)
    rollout = trainer._collect(rows(trainer))
    assert rollout.batch["completion_mask"].any(1).tolist() == [True, True, False, *[True] * 5]
    assert rollout.scored.agent_names == ("planner", "searcher")
    agents = [[(i + k + 1) % 2 for k in range(len(each.trajectory.spans))] for i, each in enumerate(rollout.samples)]
    found = [[number for number in row if number >= 0] for row in rollout.scored.agents.tolist()]
    assert found == agents and {len(row) for row in agents} == {1, 2, 3}


def test_groups_of_several_rollouts_have_the_names_of_all(tmp_path: Path, tokenizer: Any) -> None:
    rollout_func = Team(("b", "c"), ("a", "b"))
    options = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 2}
    options |= {"seed": 2, "refill_rounds": 1, "reward_funcs": agreeing_reward, "method": {"keep": "zero_variance"}}
    trainer = build(tmp_path, tokenizer, rollout_func, GroupRefillTrainer, **options)
    rollout = trainer._collect(rows(trainer, 16))
    assert rollout_func.calls == 2
    assert rollout.scored.agent_names == ("a", "b", "c")
    numbers = [[rollout.scored.agent_names.index(name) for name in each.trajectory.agents] for each in rollout.samples]
    assert {number for row in numbers for number in row} == {0, 1, 2}
    assert [[number for number in row if number >= 0] for row in rollout.scored.agents.tolist()] == numbers


def test_without_names_there_is_nothing(tmp_path: Path, tokenizer: Any) -> None:
    trainer = build(tmp_path, tokenizer, FixedRollout())
    rollout = trainer._collect(rows(trainer))
    assert rollout.scored.agents is None and rollout.scored.agent_names == ()


def test_rewards_are_those_of_trajectories_in_which_an_agent_acts(tmp_path: Path, tokenizer: Any) -> None:
    trainer = build(tmp_path, tokenizer, Team(("a", "b")))
    scored = trainer._collect(rows(trainer)).scored
    of_b = [float(total) for total, agents in zip(scored.totals(), scored.agents, strict=True) if 1 in agents.tolist()]
    assert 0 < len(of_b) < 8
    assert trainer._metrics["train"]["agents/b/reward"] == [pytest.approx(sum(of_b) / len(of_b))]


def test_a_second_gradient_is_refused_where_there_is_none(tmp_path: Path, tokenizer: Any) -> None:
    how = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(ValueError, match=r"`bias_norm` is True, but .* reentrant gradient checkpointing"):
        build(tmp_path, tokenizer, Team(("a", "b")), **how, bias_norm=True)


def test_what_is_kept_names_agents_and_who_spoke_after_each_turn(tmp_path: Path, tokenizer: Any) -> None:
    def agents(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return rollout_output(closed([TWO_AGENTS] * len(prompts), tokenizer.eos_token_id))

    build(tmp_path, tokenizer, agents, max_steps=1, save_trajectories_steps=1).train()
    kept = next(read_trained(tmp_path))
    assert kept.agents == ("planner", "searcher", "searcher", "searcher", "planner")
    assert kept.roles == ("user", "", "tool", "user", "")
    columns = ("agent", "context", "role")
    assert [tuple(segment.get(name) for name in columns) for segment in training_entry(kept, "k").segments] == [
        *(("planner", 0, None), (None, 1, None), (None, 1, "user"), ("searcher", 1, None)),
        *((None, 2, None), ("searcher", 2, None), (None, 1, "tool"), ("searcher", 1, None)),
        *((None, 0, "user"), ("planner", 0, None), (None, 0, None)),
    ]


def test_what_a_context_repeats_is_told_once(tmp_path: Path, tokenizer: Any) -> None:
    """To reward functions and in the table of completions; ids and turns are all there."""
    seen: dict[str, Any] = {}

    def reward(completions: list[str], completion_ids: Any, turn_ids: Any, **_: Any) -> list[float]:
        seen.update(texts=completions, ids=completion_ids, turns=turn_ids)
        return [float(len(ids)) for ids in completion_ids]

    trainer = build(tmp_path, tokenizer, SeveralContexts(), reward_funcs=reward, max_steps=1)
    trainer.train()
    assert list(trainer._logs["completion"]) == seen["texts"]
    told = SeveralContexts()(["w0 w1"] * len(seen["ids"]), trainer)
    for text, ids, contexts in zip(seen["texts"], told["completion_ids"], told["context_ids"], strict=True):
        shown = [token for token, context in zip(ids, contexts, strict=True) if context >= 0]
        assert text == tokenizer.decode(shown, skip_special_tokens=True)
    assert any(min(contexts) < 0 for contexts in told["context_ids"])
    assert [len(row) for row in seen["turns"]] == [len(row) for row in seen["ids"]]
    assert trainer.state.log_history[0]["completions/max_length"] == max(
        sum(turn >= 0 for turn in row) for row in seen["turns"]
    )
