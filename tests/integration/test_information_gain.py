"""Information gain through the trainers: what each turn adds to the likelihood of the golden answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sorl_trl.trainers.turns.recording import ScoredRollout
from tests.agents import agent_tokenizer, build_agent
from tests.credit import OF_PROMPTS, ROWS, rollout_of, turns_of
from tests.effects import TRAINERS, build_trainer, effect
from tests.trajectories import parity_reward, prompts


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


def rollout_of_agent(trainer: Any) -> tuple[ScoredRollout, list[dict[str, Any]]]:
    seen: list[ScoredRollout] = []
    trainer._add_advantages = lambda output, rollout: seen.append(rollout)
    inputs = [dict(trainer.train_dataset[i // 4]) for i in range(8)]
    trainer._generate_and_score_completions(inputs)
    return seen[0], inputs


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
        assert not rollout.turn_rewards.requires_grad, "a reward is no part of the loss's graph"
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
        with pytest.raises(ValueError, match=r"The column 'prompt' holds 3, but .* a string or a list of strings"):
            trainer._information_gain._answer(3)

    @pytest.mark.parametrize("trainer_name", TRAINERS)
    def test_it_makes_a_difference(self, tmp_path: Path, tokenizer: Any, trainer_name: str) -> None:
        effects = [
            effect(build_trainer(tmp_path / name, tokenizer, trainer_name, **given))
            for name, given in (("without", {}), ("with", OF_PROMPTS))
        ]
        assert effects[0] != effects[1]
