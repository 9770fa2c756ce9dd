"""Every named method trains, and its gradient does not depend on how a rollout is split into micro-batches."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from examples.information_gain import InformationGain

from sorl_trl import SOGRPOConfig, SOGRPOTrainer, SOPPOConfig, SOPPOTrainer
from sorl_trl.methods import CISPO, METHODS, token_mean
from tests.losses import build
from tests.training import settings, train
from tests.trajectories import Team, parity_reward, prompts

pytestmark = pytest.mark.trains


def first_groups_agree(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Every other group of four has equal rewards."""
    rewards = parity_reward(completion_ids)
    return [1.0 if i // 4 % 2 else reward for i, reward in enumerate(rewards)]


def turn_lengths(turn_ids: list[list[int]], **_: Any) -> list[list[float | None]]:
    """A reward per turn, and none for each last one."""
    counts = [[row.count(k) / 4 for k in range(max(row) + 1)] for row in turn_ids]
    return [[*row[:-1], None] for row in counts]


@pytest.mark.parametrize("name", METHODS)
def test_every_named_method_trains(tmp_path: Path, tokenizer: Any, name: str) -> None:
    arguments = {**settings(tmp_path, max_steps=2), "reward_funcs": parity_reward}
    del arguments["epsilon"]
    kind: tuple[Any, Any] = (SOGRPOTrainer, SOGRPOConfig)
    if METHODS[name].needs_critic:
        kind = (SOPPOTrainer, SOPPOConfig)
        arguments["critic_warmup_steps"] = 0
    arguments["rollout_func"] = Team(("a", "b")) if name == "dr_mas" else None
    trainer = train(*kind, tokenizer, **arguments, method=name)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 2 and all(math.isfinite(log["loss"]) for log in logs)
    assert logs[0]["grad_norm"] > 0


PENALTY = {"clip_penalty": {"epsilon": None}}
COMPOSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "so_grpo": ({"terms": "clip_penalty"}, {}),
    **{name: (METHODS[name], {}) for name in ("so_grpo_note", "st_grpo", "gspo")},
    "penalized_sequence": (
        {"terms": "clip_penalty"},
        {"importance_sampling_level": "sequence", "loss_type": "dapo"},
    ),
    "gigpo_penalized": ({"credit": "gigpo", "terms": PENALTY}, {"gamma": 0.9}),
    "filtered": ({"keep": "zero_variance", "terms": "clip_penalty"}, {"reward_funcs": first_groups_agree}),
    "filtered_dapo": (METHODS["dapo"], {"reward_funcs": first_groups_agree}),
    "cispo": (replace(METHODS["grpo"], surrogate=CISPO(1.2), mean=token_mean), {}),
    "turn_rewards": ({"terms": "clip_penalty"}, {"reward_funcs": [turn_lengths, parity_reward]}),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_gradients_do_not_depend_on_micro_batches(tmp_path: Path, tokenizer: Any, name: str) -> None:
    """Two SGD steps in float64 over the same eight trajectories: as one micro-batch, or as eight."""
    method, fields = COMPOSED[name]
    weights = []
    for batch_size, accumulation in ((8, 1), (1, 8)):
        sizes = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
        sizes |= {"steps_per_generation": accumulation, "max_grad_norm": 1e9, "lr_scheduler_type": "constant"}
        plain = {"optim": "sgd", "learning_rate": 1.0, "max_steps": 2}
        given = {"target_kl": 0.0, **method} if isinstance(method, dict) else method
        trainer = build(tmp_path / str(batch_size), tokenizer, given, **{**plain, **fields, **sizes})
        trainer.train()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
        assert trainer.state.log_history[1]["kl_to_old"] > 1e-4, "the policy has not moved: a weak test"
    torch.testing.assert_close(*weights, rtol=0, atol=1e-6)


def test_what_is_not_kept_is_logged_and_counts_nowhere_but_in_evaluations(tmp_path: Path, tokenizer: Any) -> None:
    trainer = build(tmp_path, tokenizer, METHODS["dapo"], reward_funcs=first_groups_agree)
    batch = trainer._generate_and_score_completions([dict(row) for row in prompts(2) for _ in range(4)])
    assert trainer._metrics["train"]["keep/ZeroVariance"] == [0.5]
    kept = (batch["turn_ids"] >= 0).any(1)
    assert kept.tolist() == [True] * 4 + [False] * 4
    assert int(batch["num_items_in_batch"]) == int((batch["turn_ids"] >= 0).sum())
    assert float(batch["row_scale"]) == 2.0
    trainer.model.eval()
    batch = trainer._generate_and_score_completions([dict(row) for row in prompts(2) for _ in range(4)])
    assert (batch["turn_ids"] >= 0).any(1).all()


class TestInformationGain:
    def test_each_turn_earns_what_it_adds(self, tmp_path: Path, tokenizer: Any) -> None:
        """Against rows without padding, one by one; the last turn has its outcome and no gain."""
        gain = InformationGain(column="answer", prefix="w7 ", coef=2.0)
        rewards = [gain, parity_reward]
        trainer = build(tmp_path, tokenizer, reward_funcs=rewards)
        seen: list[Any] = []
        apply = trainer._apply_method
        trainer._apply_method = lambda rollout: (seen.append(rollout), apply(rollout))[1]
        rows = [{**row, "answer": ["w5 w6"], "sampled": 1} for row in prompts(2) for _ in range(4)]
        trainer._generate_and_score_completions([dict(row) for row in rows])
        scored, answer = seen[0].scored, tokenizer.encode("w7 w5 w6")
        for row, each in enumerate(sample.trajectory for sample in seen[0].samples):
            starts = [start for start, _ in each.spans]
            before = [[*each.prompt_ids, *each.completion_ids[:start]] for start in starts]
            scores = [self.score(trainer, [*ids, *answer]) for ids in before]
            found = scored.turn_rewards[row, : len(starts) - 1].tolist()
            expected = [2.0 * (after - before) for before, after in pairwise(scores)]
            assert found == pytest.approx(expected, abs=1e-5)
            assert scored.has_turn_reward[row].tolist()[: len(starts)] == [True] * (len(starts) - 1) + [False]

    def score(self, trainer: Any, ids: list[int]) -> float:
        """The mean log-probability of the last two tokens."""
        with torch.no_grad():
            logps = trainer.model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        return sum(logps[len(ids) - 3 + i, ids[len(ids) - 2 + i]].item() for i in range(2)) / 2


def test_what_does_not_combine_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"micro_batch_mean.*`loss_type` 'bnpo'"):
        build(tmp_path, tokenizer, {"keep": "zero_variance"}, loss_type="bnpo")
    with pytest.raises(ValueError, match=r"`epsilon` is 0\.2 and `loss_type` is 'cispo', but .* `surrogate`: SAPO"):
        build(tmp_path, tokenizer, {"surrogate": "sapo"}, loss_type="cispo", importance_sampling_level="token")
    trainer = build(tmp_path, tokenizer, reward_funcs=[InformationGain(), parity_reward])
    with pytest.raises(ValueError, match="`column` is 'golden_answers'"):
        trainer._generate_and_score_completions([dict(row) for row in prompts(2) for _ in range(4)])
