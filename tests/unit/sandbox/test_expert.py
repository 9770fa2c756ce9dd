from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sorl_trl.qa import Question
from sorl_trl.sandbox import NO_NOISE, PROMPT_TEMPLATE, THINKING, ScriptedExpert, World, train_tokenizer

from .helpers import HOME, PROMPT, QUESTION, RIVER, mean, run_expert

BORN = f"{PROMPT} <search> ann lee born </search> <information> ann lee was born in new ulm . </information>"
DRINKS = f"{BORN} <search> new ulm drinks </search> <information> new ulm drinks from blue nile . </information>"
LOST = f"{PROMPT} <search> ann </search> <information> nothing </information>"
TEXTS = f"{DRINKS} {LOST} {PROMPT_TEMPLATE} unknown"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([World("toy", (HOME, RIVER), (), (Question("", TEXTS, ("",)),), ())])


def turn(tokenizer, context: str) -> str:
    prompts = {tuple(tokenizer.encode(PROMPT)): QUESTION}
    expert = ScriptedExpert(tokenizer, [HOME, RIVER], prompts, NO_NOISE, seed=0)
    ids = tokenizer.encode(context, add_special_tokens=False)
    (generation,) = expert.generate([ids], [99])
    return tokenizer.decode(generation.token_ids)


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (PROMPT, "<search> ann lee born </search>"),
        (BORN, "<search> new ulm drinks </search>"),
        (DRINKS, "<answer> blue nile </answer>"),
        (LOST, "<answer> unknown </answer>"),
    ],
)
def test_without_noise_it_follows_the_relations_and_answers(tokenizer, context, expected):
    assert turn(tokenizer, context) == expected


def test_who_thinks_without_mistakes_answers_with_the_real_search_engine(invented: World, tmp_path: Path) -> None:
    rows = run_expert(invented, replace(THINKING, noise=NO_NOISE), tmp_path)
    assert mean(rows, "exact_match") >= 0.95


def test_who_thinks_mostly_searches_once(invented: World, tmp_path: Path) -> None:
    """As the quickstart's policy saw it done."""
    rows = run_expert(invented, THINKING, tmp_path)
    assert mean(rows, "searches", 1) == 1.0
    assert 1.0 < mean(rows, "searches", 2) < 1.5
