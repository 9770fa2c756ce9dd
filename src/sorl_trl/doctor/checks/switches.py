"""Switches of groups and of credit: what the trainer refuses once the model is loaded, or would do nothing."""

from __future__ import annotations

from collections.abc import Iterator

from sorl_trl import qa
from sorl_trl.checks import Problem
from sorl_trl.doctor.findings import Finding
from sorl_trl.doctor.subject import Subject, given
from sorl_trl.trainers.base_config import TurnLevelConfig
from sorl_trl.trainers.checks.dataset import answer_column_problems
from sorl_trl.trainers.turns.refill import refill_size_problems
from sorl_trl.trainers.turns.selection import reward_name_problems


def check_switches(subject: Subject) -> Iterator[Finding]:
    """Whether rewards and questions have what the switches of groups and credit look for."""
    config: TurnLevelConfig = given(subject.arguments.config, "the trainer's config")
    known = [name for name in subject.raw.rewards if name in qa.REWARDS]
    rewards = given(known or None, "rewards that there are")
    finding, is_fine = subject.recipe.finding, True
    for found in (
        map(finding, reward_name_problems(config, [*map(_name_in_trainer, rewards)])),
        _kinds(subject, config, rewards),
        map(finding, _problems_of_questions(subject, config)),
    ):
        for each in found:
            is_fine = False
            yield each
    if is_fine:
        yield Finding("ok", "rewards and questions have what the switches of groups and credit look for")


def _name_in_trainer(reward: str) -> str:
    return str(getattr(qa.REWARDS[reward], "__name__", reward))


def _problems_of_questions(subject: Subject, config: TurnLevelConfig) -> Iterator[Problem]:
    """Whether there are enough of them, and what is scored of them."""
    if config.group_refill:
        given(subject.questions, "questions")
        yield from refill_size_problems("train_questions", subject.questions_in_all, config)
    if config.information_gain_coef:
        first = given(subject.questions, "questions")[:1]
        row = qa.build_prompt_rows(first, subject.rollout.prompt_template, subject.rollout.chat)[0]
        yield from answer_column_problems("train_questions", row, config)


def _kinds(subject: Subject, config: TurnLevelConfig, rewards: list[str]) -> Iterator[Finding]:
    """Whether there is more than one kind of reward to normalize apart."""
    is_separate = config.turn_reward_normalization == "separate"
    if is_separate and not config.information_gain_coef and not qa.TURN_REWARDS.intersection(rewards):
        what = "`turn_reward_normalization` is 'separate', but none of `rewards` is one float per turn "
        what += f"({', '.join(sorted(qa.TURN_REWARDS))}), and `information_gain_coef` is 0: there are outcomes alone"
        yield Finding("warning", what, subject.recipe.line("turn_reward_normalization", "together"))
