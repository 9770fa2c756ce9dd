"""Credit of turns through the trainers: rewards normalized apart, information gain, turns of one state compared."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_trl import SOGRPOTrainer
from sorl_trl.trainers.turns.recording import ScoredRollout
from tests.agents import agent_tokenizer, build_agent
from tests.effects import TRAINERS, build_trainer, effect
from tests.policies import build_policy
from tests.training import settings, train
from tests.trajectories import FixedRollout, parity_reward, prompts

ROWS = 8
OF_PROMPTS = {"information_gain_coef": 1.0, "information_gain_column": "prompt"}
"""The prompt of fixed trajectories is as good an answer as any."""
ALL_ON = {**OF_PROMPTS, "turn_reward_normalization": "separate", "step_advantage_coef": 1.0, "gamma": 0.9}


def turn_reward(turn_ids: list[list[int]], completion_ids: list[list[int]], **_: Any) -> list[list[float] | None]:
    """One float per turn; nothing for every fourth trajectory or so, which has an outcome alone then."""
    return [
        None if sum(ids) % 4 == 0 else [(sum(ids) + 2 * turn) % 5 / 5 for turn in range(max(turns) + 1)]
        for turns, ids in zip(turn_ids, completion_ids, strict=True)
    ]


BOTH_REWARDS = [turn_reward, parity_reward]


def rollout_of(trainer: Any, rows: int = ROWS) -> tuple[ScoredRollout, dict[str, Any]]:
    """A rollout as its advantages are made of it, and the batch."""
    seen: list[ScoredRollout] = []
    add = trainer._add_advantages
    trainer._add_advantages = lambda output, rollout: (seen.append(rollout), add(output, rollout))
    batch = trainer._generate_and_score_completions([dict(prompts(rows)[i // 4]) for i in range(rows)])
    return seen[0], batch


def turns_of(rollout: ScoredRollout) -> list[int]:
    return rollout.turns.counts.tolist()


def z(values: list[float]) -> list[float]:
    mean = sum(values) / len(values)
    spread = math.sqrt(sum((v - mean) ** 2 for v in values) / max(len(values) - 1, 1))
    return [(v - mean) / (spread + 1e-4) for v in values]


def assert_advantages(batch: dict[str, Any], expected: list[list[float]]) -> None:
    for got, turn_ids, row in zip(batch["advantages"], batch["turn_ids"], expected, strict=True):
        values = [0.0 if turn < 0 else row[turn] for turn in turn_ids.tolist()]
        assert got.tolist() == pytest.approx(values, rel=1e-4, abs=1e-4)


def discounted(rewards: list[float], gamma: float) -> list[float]:
    return [sum(gamma ** (j - k) * r for j, r in enumerate(rewards) if j >= k) for k in range(len(rewards))]


class TestSeparate:
    def test_turn_rewards_and_outcomes_are_normalized_apart(self, tmp_path: Path, tokenizer: Any) -> None:
        trainer = build_trainer(
            tmp_path, tokenizer, "SO-GRPO", reward_funcs=BOTH_REWARDS, turn_reward_normalization="separate", gamma=0.5
        )
        rollout, batch = rollout_of(trainer)
        ids = [list(row) for row in rollout.generated.completion_ids]
        of_turns = turn_reward([list(row) for row in rollout.generated.turn_ids], ids)
        outcomes = parity_reward(ids)
        assert None in of_turns, "no turn reward is missing: a weak test"
        expected: list[list[float]] = []
        for first in range(0, ROWS, 4):
            group = range(first, first + 4)
            turns = iter(z([reward for i in group for reward in of_turns[i] or []]))
            ends = z([outcomes[i] for i in group])
            for i in group:
                rewards = [0.0] * turns_of(rollout)[i] if of_turns[i] is None else [next(turns) for _ in of_turns[i]]
                rewards[-1] += ends[i - first]
                expected.append(discounted(rewards, 0.5))
        assert_advantages(batch, expected)

    def test_it_makes_a_difference(self, tmp_path: Path, tokenizer: Any) -> None:
        effects = [
            effect(
                build_trainer(
                    tmp_path / kind,
                    tokenizer,
                    "SO-GRPO",
                    reward_funcs=BOTH_REWARDS,
                    turn_reward_normalization=kind,
                )
            )
            for kind in ("together", "separate")
        ]
        assert effects[0] != effects[1]


def score(trainer: Any, context: list[int], answer: list[int]) -> float:
    """The mean log-probability of the answer, of one row without padding."""
    ids = torch.tensor([[*context, *answer]])
    with torch.no_grad():
        logps = trainer.model(input_ids=ids).logits[0].div(trainer.temperature).log_softmax(-1)
    positions = range(len(context) - 1, len(context) + len(answer) - 1)
    return sum(logps[p, token].item() for p, token in zip(positions, answer, strict=True)) / len(answer)


def expected_gains(trainer: Any, rollout: ScoredRollout, answers: list[tuple[list[int], list[int]]]) -> Tensor:
    gains = torch.zeros_like(rollout.turn_rewards)
    made = rollout.generated
    columns = zip(made.prompt_ids, made.completion_ids, made.turn_ids, answers, strict=True)
    for row, (prompt, completion, turn_ids, (prefix, answer)) in enumerate(columns):
        starts = [turn_ids.index(turn) for turn in range(max(turn_ids) + 1)]
        scores = [score(trainer, [*prompt, *completion[:start], *prefix], answer) for start in starts]
        for turn in range(len(starts) - 1):
            gains[row, turn] = scores[turn + 1] - scores[turn]
    return gains


class TestInformationGain:
    @pytest.mark.parametrize("trainer_name", TRAINERS)
    def test_it_is_what_each_turn_adds(self, tmp_path: Path, tokenizer: Any, trainer_name: str) -> None:
        """Against rows without padding, one by one; the last turn has its outcome and no gain."""
        overrides = {**OF_PROMPTS, "information_gain_coef": 2.0, "temperature": 0.7}
        trainer = build_trainer(tmp_path, tokenizer, trainer_name, **overrides)
        rollout, _ = rollout_of(trainer)
        answers = [([], list(prompt)) for prompt in rollout.generated.prompt_ids]
        gains = expected_gains(trainer, rollout, answers)
        expected = 2.0 * gains
        for row, outcome in enumerate(parity_reward([list(ids) for ids in rollout.generated.completion_ids])):
            expected[row, turns_of(rollout)[row] - 1] += outcome
        assert gains.abs().max() > 1e-3, "nothing is gained: a weak test"
        torch.testing.assert_close(rollout.turn_rewards, expected, rtol=0, atol=1e-5)
        count = sum(turns - 1 for turns in turns_of(rollout))
        metrics = trainer._metrics["train"]
        assert metrics["information_gain/mean"] == [pytest.approx(gains.sum().item() / count, abs=1e-5)]
        assert metrics["information_gain/missing"] == [0.0]

    def test_a_searching_policy_is_scored_behind_the_answer_tag(self, tmp_path: Path) -> None:
        trainer = build_agent(tmp_path, information_gain_coef=1.0)
        _, _ = rollout_of_agent(trainer)
        tag, rome = agent_tokenizer().convert_tokens_to_ids(["<answer>", "rome"])
        assert trainer._information_gain._answer(["rome", "oslo"]) == ([tag], [rome])

    def test_the_gains_of_a_searching_policy(self, tmp_path: Path) -> None:
        """The state after a search holds what was found, and a corrective message what was said."""
        trainer = build_agent(tmp_path, information_gain_coef=1.0, reward_funcs=[lambda prompts, **_: [0.0] * 8])
        rollout, inputs = rollout_of_agent(trainer)
        answers = [trainer._information_gain._answer(row["golden_answers"]) for row in inputs]
        gains = expected_gains(trainer, rollout, answers)
        assert gains.abs().max() > 1e-3
        torch.testing.assert_close(rollout.turn_rewards, gains, rtol=0, atol=1e-5)

    def test_a_prefix_of_ones_own(self, tmp_path: Path, tokenizer: Any) -> None:
        trainer = build_trainer(tmp_path, tokenizer, "SO-GRPO", **OF_PROMPTS, information_gain_prefix="w7 ")
        rollout, _ = rollout_of(trainer)
        answers = [(tokenizer.encode("w7"), list(prompt)) for prompt in rollout.generated.prompt_ids]
        gains = expected_gains(trainer, rollout, answers)
        outcomes = parity_reward([list(ids) for ids in rollout.generated.completion_ids])
        for row, turns in enumerate(turns_of(rollout)):
            gains[row, turns - 1] += outcomes[row]
        torch.testing.assert_close(rollout.turn_rewards, gains, rtol=0, atol=1e-5)

    def test_its_column_is_read(self, tmp_path: Path, tokenizer: Any) -> None:
        rewards = []
        for answer in ("w1", "w2"):
            trainer = build_trainer(
                tmp_path / answer, tokenizer, "SO-GRPO", information_gain_coef=1.0, information_gain_column="prompt"
            )
            inputs = [{**prompts(ROWS)[0], "answer": answer} for _ in range(ROWS)]
            trainer.args.information_gain_column = "answer"
            seen: list[ScoredRollout] = []
            trainer._add_advantages = lambda output, rollout, seen=seen: seen.append(rollout)
            trainer._generate_and_score_completions(inputs)
            rewards.append(seen[0].turn_rewards)
        assert (rewards[0] - rewards[1]).abs().max() > 1e-3

    def test_what_the_policy_cannot_read_has_no_gain(self, tmp_path: Path, tokenizer: Any) -> None:
        """It is counted as missing, and is no zero: `separate` leaves it out."""
        trainer = build_trainer(tmp_path, tokenizer, "SO-GRPO", **OF_PROMPTS, turn_reward_normalization="separate")
        trainer.model.config.max_position_embeddings = 8
        rollout, _ = rollout_of(trainer)
        [missing] = trainer._metrics["train"]["information_gain/missing"]
        assert rollout.kinds is not None
        count = sum(turns - 1 for turns in turns_of(rollout))
        assert 0 < missing < 1
        assert rollout.kinds.has_turn_reward.sum() == round(count * (1 - missing))

    def test_an_answer_that_is_empty_has_no_gain(self, tmp_path: Path, tokenizer: Any) -> None:
        trainer = build_trainer(tmp_path, tokenizer, "SO-GRPO", **OF_PROMPTS)
        assert [trainer._information_gain._answer(golden)[1] for golden in (None, [], "", [" "])] == [[]] * 4

    def test_ranks_make_equally_many_passes(self, tmp_path: Path, tokenizer: Any) -> None:
        """ZeRO-3 gathers parameters in each: here another rank has nine rows, and this one none."""
        trainer = build_trainer(tmp_path, tokenizer, "SO-GRPO", **OF_PROMPTS)
        passes = []
        trainer._get_per_token_logps_and_entropies = lambda model, ids, mask, keep: (
            passes.append(ids.shape) or torch.zeros(len(ids), keep), None, None,
        )  # fmt: skip
        trainer.accelerator.gather = lambda count: torch.stack([count, torch.tensor(9)])
        assert trainer._information_gain._scores([]).shape == (0,)
        assert passes == [(1, 2)] * 3

    @pytest.mark.parametrize("argument", ["train_dataset", "eval_dataset"])
    def test_a_missing_column_is_named(self, tmp_path: Path, argument: str) -> None:
        extra = {"eval_dataset": prompts()} if argument == "eval_dataset" else {"information_gain_column": "gold"}
        column = "golden_answers" if argument == "eval_dataset" else "gold"
        with pytest.raises(ValueError, match=rf"^`{argument}` has no column '{column}', .*information_gain_coef"):
            build_agent(tmp_path, information_gain_coef=1.0, **extra)

    def test_a_column_of_something_else_is_refused(self, tmp_path: Path, tokenizer: Any) -> None:
        trainer = build_trainer(tmp_path, tokenizer, "SO-GRPO", **OF_PROMPTS)
        with pytest.raises(ValueError, match=r"The column 'prompt' holds \[3\], but .* a string or a list of strings"):
            trainer._information_gain._answer([3])

    @pytest.mark.parametrize("trainer_name", TRAINERS)
    def test_it_makes_a_difference(self, tmp_path: Path, tokenizer: Any, trainer_name: str) -> None:
        effects = [
            effect(build_trainer(tmp_path / name, tokenizer, trainer_name, **given))
            for name, given in (("without", {}), ("with", OF_PROMPTS))
        ]
        assert effects[0] != effects[1]


def rollout_of_agent(trainer: Any) -> tuple[ScoredRollout, list[dict[str, Any]]]:
    seen: list[ScoredRollout] = []
    trainer._add_advantages = lambda output, rollout: seen.append(rollout)
    inputs = [dict(trainer.train_dataset[i // 4]) for i in range(8)]
    trainer._generate_and_score_completions(inputs)
    return seen[0], inputs


class SameObservations(FixedRollout):
    """Trajectories whose observations are one word, up to three times, so that states repeat."""

    def _trajectory(self, index: int) -> tuple[list[int], list[int]]:
        ids, turns = super()._trajectory(index)
        return [18 if turn < 0 else id_ for id_, turn in zip(ids, turns, strict=True)], turns


class TestStepAdvantages:
    @pytest.mark.parametrize("scale", ["group", "none"])
    def test_turns_of_one_state_are_compared(self, tmp_path: Path, tokenizer: Any, scale: str) -> None:
        overrides = {"gamma": 0.5, "scale_rewards": scale, "reward_funcs": BOTH_REWARDS}
        of_coef = []
        for coef in (0.0, 2.0):
            trainer = build_trainer(tmp_path / str(coef), tokenizer, "SO-GRPO", step_advantage_coef=coef, **overrides)
            trainer.rollout_func = SameObservations()
            rollout, batch = rollout_of(trainer, rows=16)
            of_coef.append(batch["advantages"])
        steps = step_advantages(rollout, 0.5, scale == "group")
        batch["advantages"] = (of_coef[1] - of_coef[0]) / 2.0
        assert_advantages(batch, steps)
        later = [value for row in steps for value in row[1:]]
        assert any(later), "no state repeats after the first turn: a weak test"

    def test_how_many_turns_share_a_state_is_logged(self, tmp_path: Path, tokenizer: Any) -> None:
        trainer = build_trainer(tmp_path, tokenizer, "SO-GRPO", step_advantage_coef=1.0)
        trainer.rollout_func = FixedRollout(max_turns=1)
        rollout_of(trainer)
        assert trainer._metrics["train"]["turns/shared_state"] == [1.0]

    def test_with_one_turn_it_is_the_groups_advantage_once_more(self, tmp_path: Path, tokenizer: Any) -> None:
        advantages = []
        for coef in (0.0, 1.0):
            trainer = build_trainer(tmp_path / str(coef), tokenizer, "SO-GRPO", step_advantage_coef=coef, gamma=0.9)
            trainer.rollout_func = FixedRollout(max_turns=1)
            advantages.append(rollout_of(trainer)[1]["advantages"])
        torch.testing.assert_close(advantages[1], 2 * advantages[0])

    def test_it_makes_a_difference(self, tmp_path: Path, tokenizer: Any) -> None:
        effects = [
            effect(build_trainer(tmp_path / str(coef), tokenizer, "SO-GRPO", step_advantage_coef=coef))
            for coef in (0.0, 1.0)
        ]
        assert effects[0] != effects[1]


def step_advantages(rollout: ScoredRollout, gamma: float, scale: bool) -> list[list[float]]:
    """GiGPO's, by the tokens of the observations themselves."""
    made, rewards = rollout.generated, rollout.turn_rewards.tolist()
    cells: dict[Any, list[tuple[int, int]]] = {}
    returns = [discounted(row[:turns], gamma) for row, turns in zip(rewards, turns_of(rollout), strict=True)]
    for row, (completion, turn_ids) in enumerate(zip(made.completion_ids, made.turn_ids, strict=True)):
        for turn in range(turns_of(rollout)[row]):
            start = turn_ids.index(turn)
            seen = start - next((i for i, t in enumerate(reversed(turn_ids[:start])) if t >= 0), start)
            observed = tuple(completion[seen:start])
            own = (row, turn) if turn and not observed else observed
            cells.setdefault((row // 4, turn == 0, own), []).append((row, turn))
    advantages = [[0.0] * len(row) for row in returns]
    for members in cells.values():
        values = [returns[row][turn] for row, turn in members]
        centred = z(values) if scale else [v - sum(values) / len(values) for v in values]
        for (row, turn), value in zip(members, centred, strict=True):
            advantages[row][turn] = value
    return advantages


def test_it_does_not_matter_how_a_rollout_is_split(tmp_path: Path, tokenizer: Any) -> None:
    runs = [
        train(
            SOGRPOTrainer,
            SOGRPOTrainer.config_class,
            tokenizer,
            reward_funcs=BOTH_REWARDS,
            rollout_func=SameObservations(),
            **settings(
                tmp_path / str(size),
                per_device_train_batch_size=size,
                steps_per_generation=16 // size,
                gradient_accumulation_steps=8 // size,
                optim="sgd",
                **ALL_ON,
            ),
        )
        for size in (8, 2)
    ]
    assert_weights(*runs)


def assert_weights(ours: Any, theirs: Any) -> None:
    start = build_policy().state_dict()
    moved = 0.0
    for (name, a), (_, b) in zip(ours.model.named_parameters(), theirs.model.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
        moved = max(moved, (a.detach() - start[name]).abs().max().item())
    assert moved > 1e-3, "the weights have not moved: a weak test"
