"""Options of batches, of logging and of loading: honoured, seen from outside; docs/options.md names these tests."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from sorl_trl import SOGRPOTrainer, SOPPOTrainer
from sorl_trl.search import NoSearch
from sorl_trl.trainers.agents import policy_engine
from sorl_trl.trainers.critic import build as critic_build
from tests.agents import build_agent, questions
from tests.critics import build_ppo
from tests.policies import build_policy
from tests.training import settings
from tests.trajectories import Counting, FixedRollout, parity_reward, prompts

READ_BY_TRL = {
    "trust_remote_code": GRPOTrainer.__init__,
    "log_unique_prompts": GRPOTrainer.log,
    "log_multimodal": GRPOTrainer.__init__,
    "log_completions_hub_repo": GRPOTrainer.__init__,
    "use_vllm": GRPOTrainer.__init__,
    "sync_ref_model": GRPOTrainer.__init__,
    "num_completions_to_print": GRPOTrainer.__init__,
}
"""Needs the hub, a tracker, remote code or an engine: a place in TRL's code that reads it and that stays TRL's own."""


def build(tmp_path: Path, tokenizer: Any, rows: int = 16, **overrides: Any) -> SOGRPOTrainer:
    rollout = overrides.pop("rollout_func", FixedRollout())
    model = overrides.pop("model", None) or build_policy()
    config = SOGRPOTrainer.config_class(**settings(tmp_path, **overrides))
    return SOGRPOTrainer(
        model, parity_reward, config, prompts(rows), prompts(rows), processing_class=tokenizer, rollout_func=rollout
    )


@pytest.mark.parametrize(
    ("options", "rollouts", "rows", "groups"),
    [
        ({}, 1, 16, 4),
        ({"num_generations": 2}, 1, 16, 8),
        ({"steps_per_generation": 2}, 2, 8, 2),
        ({"steps_per_generation": None, "generation_batch_size": 8}, 2, 8, 2),
        ({"num_iterations": 1}, 2, 16, 4),
    ],
)
def test_the_size_of_rollouts(
    tmp_path: Path, tokenizer: Any, options: dict[str, Any], rollouts: int, rows: int, groups: int
) -> None:
    rollout = Counting()
    build(tmp_path, tokenizer, rollout_func=rollout, max_steps=4, **options).train()
    assert [len(asked) for asked in rollout.asked] == [rows] * rollouts
    assert [len(set(asked)) for asked in rollout.asked] == [groups] * rollouts


def test_shuffle_dataset(tmp_path: Path, tokenizer: Any) -> None:
    orders = []
    for shuffle in (True, False):
        rollout = Counting()
        build(tmp_path, tokenizer, rollout_func=rollout, max_steps=1, shuffle_dataset=shuffle).train()
        orders.append(list(dict.fromkeys(rollout.asked[0])))
    in_order = prompts(4)["prompt"]
    assert orders[0] != in_order
    assert orders[1] == list(in_order)


@pytest.mark.parametrize("num_generations_eval", [1, 2])
def test_num_generations_eval(tmp_path: Path, tokenizer: Any, num_generations_eval: int) -> None:
    rollout = Counting()
    trainer = build(
        tmp_path, tokenizer, 4, rollout_func=rollout, num_generations_eval=num_generations_eval, max_steps=1
    )
    trainer.evaluate()
    assert sum(map(len, rollout.asked)) == 4 * num_generations_eval


def test_max_completion_length(tmp_path: Path) -> None:
    """It holds all turns and observations; a limit of the rollout's own must not exceed it."""
    trainer = build_agent(tmp_path, search=NoSearch(), max_completion_length=9, limits=None, max_steps=1)
    output = trainer.rollout_func([row["prompt"] for row in questions(8)], trainer)
    assert max(map(len, output["completion_ids"])) <= 10  # the end of sequence of a complete one is added
    with pytest.raises(ValueError, match=r"`limits.max_trajectory_tokens` is 32, more than .*`max_completion_length`"):
        build_agent(tmp_path, search=NoSearch(), max_completion_length=9, max_steps=1).train()


def test_pad_to_multiple_of(tmp_path: Path, tokenizer: Any) -> None:
    trainer = build(tmp_path, tokenizer, pad_to_multiple_of=16)
    batch = trainer._generate_and_score_completions([dict(row) for row in prompts(4)])
    assert {batch[name].shape[1] % 16 for name in ("prompt_ids", "completion_ids", "turn_ids")} == {0}


def test_chat_template_kwargs_reach_feedback(tmp_path: Path) -> None:
    """What a chat template is told for prompts it is told for the messages between turns too."""
    template = (
        "{% for m in messages %}{{ m.role + ' ' + m.content + ' <eos> ' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'rome' if quiet else 'oslo' }}{% endif %}"
    )
    frames = []
    for options in ({}, {"quiet": True}):
        trainer = build_agent(tmp_path, search=NoSearch(), chat_template_kwargs=options)
        trainer._tokenizer.chat_template = template
        rollout = trainer.rollout_func.__wrapped__
        rollout.protocol = type(rollout.protocol)()
        frames.append(rollout._protocol_for([[{"role": "user", "content": "where"}]], trainer).message_frame.suffix)
    assert [frame.split()[-1] for frame in frames] == ["oslo", "rome"]


@pytest.mark.parametrize("trainer_class", [SOGRPOTrainer, SOPPOTrainer])
def test_log_completions(tmp_path: Path, trainer_class: Any) -> None:
    size = {"per_device_train_batch_size": 2, "num_generations": 1} if trainer_class is SOPPOTrainer else {}
    build_agent(tmp_path, trainer_class=trainer_class, log_completions=True, max_steps=1, **size).train()
    table = pd.read_parquet(tmp_path / "completions/completions_00001.parquet")
    assert {"prompt", "completion", "advantage", "turns_reward"} <= set(table.columns)
    assert len(table) > 0


def test_num_completions_to_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[Any] = []
    monkeypatch.setattr(grpo_trainer, "is_rich_available", lambda: True)
    monkeypatch.setattr(grpo_trainer, "print_prompt_completions_sample", lambda *args, **_: printed.append(args[5]))
    build_agent(tmp_path, search=NoSearch(), log_completions=True, num_completions_to_print=3, max_steps=1).train()
    assert set(printed) == {3}


def test_remove_unused_columns(tmp_path: Path) -> None:
    """Reward functions then get the rollout's fields alone."""
    seen: list[set[str]] = []

    def reward(completions: list[str], **columns: Any) -> list[float]:
        seen.append(set(columns))
        return [0.0] * len(completions)

    for removes in (False, True):
        build_agent(
            tmp_path, search=NoSearch(), remove_unused_columns=removes, reward_funcs=reward, max_steps=1
        ).train()
    assert seen[0] - seen[1] == {"golden_answers"}
    assert "trajectory" in seen[1]


@pytest.mark.parametrize("trainer", ["SO-GRPO", "SO-PPO"])
def test_the_reference_follows(tmp_path: Path, tokenizer: Any, trainer: str) -> None:
    """`sync_ref_model`, `ref_model_sync_steps` and `ref_model_mixup_alpha`."""
    moved = {}
    for alpha, steps in ((1.0, 1), (0.5, 1), (1.0, 9)):
        folder = tmp_path / f"{alpha}-{steps}"
        folder.mkdir()
        build_policy().save_pretrained(folder / "policy")
        overrides = {
            "sync_ref_model": True,
            "ref_model_mixup_alpha": alpha,
            "ref_model_sync_steps": steps,
            "beta": 0.1,
        }
        model = str(folder / "policy")
        start = build if trainer == "SO-GRPO" else build_ppo
        trained = start(folder, tokenizer, model=model, max_steps=1, **overrides)
        trained.train()
        before = dict(build_policy().named_parameters())
        after = {n: p for n, p in trained.model.named_parameters() if n in before}
        reference = dict(trained.ref_model.named_parameters())
        moved[alpha, steps] = [
            ((reference[n] - before[n]).norm() / (after[n] - before[n]).norm()).item() for n in before if n in after
        ]
    assert moved[1.0, 1] == pytest.approx([1.0] * len(moved[1.0, 1]), abs=1e-4)
    assert moved[0.5, 1] == pytest.approx([0.5] * len(moved[0.5, 1]), abs=1e-4)
    assert moved[1.0, 9] == [0.0] * len(moved[1.0, 9])


def test_model_init_kwargs(tmp_path: Path, tokenizer: Any) -> None:
    build_policy().save_pretrained(tmp_path / "policy")
    options = {"dtype": "bfloat16", "attention_dropout": 0.1}
    trainer = build(tmp_path, tokenizer, model=str(tmp_path / "policy"), model_init_kwargs=options)
    assert trainer.model.dtype == torch.bfloat16
    assert trainer.model.config.attention_dropout == 0.1


@pytest.mark.parametrize("option", READ_BY_TRL)
def test_what_trl_reads_itself(option: str) -> None:
    assert f"args.{option}" in inspect.getsource(READ_BY_TRL[option]) or f"self.{option}" in inspect.getsource(
        READ_BY_TRL[option]
    )


def test_what_we_read_as_trl_does() -> None:
    assert "args.ds3_gather_for_generation" in inspect.getsource(policy_engine.policy_engine)
    assert "config.trust_remote_code" in inspect.getsource(critic_build)
