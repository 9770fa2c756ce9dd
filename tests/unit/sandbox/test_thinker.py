"""The expert that thinks before it acts."""

from __future__ import annotations

from pathlib import Path

import pytest

from sorl_trl.evaluation import EvaluatedTrajectory, mean_measure, split_by_hops
from sorl_trl.qa import Question
from sorl_trl.sandbox import (
    NO_NOISE,
    PROMPT_TEMPLATE,
    ExpertNoise,
    Thinker,
    ThinkingWarmStart,
    World,
    train_tokenizer,
)

from .helpers import HOME, PROMPT, QUESTION, RIVER, run_expert

NEED = "<think> i need the hometown </think> <search> ann lee born </search>"
BORN = f"{PROMPT} {NEED} <information> ann lee was born in new ulm . </information>"
NOW = "<think> this is the hometown , now the water </think> <search> new ulm drinks </search>"
DRINKS = f"{BORN} {NOW} <information> new ulm drinks from blue nile . </information>"
DONE = "<think> this is the water , done </think> <answer> blue nile </answer>"
EARLY = "<think> this is the hometown , done </think> <answer> new ulm </answer>"
LOST = f"{PROMPT} {NEED} <information> nothing </information>"
GIVEN_UP = "<think> this is nothing , done </think> <answer> unknown </answer>"


@pytest.fixture(scope="module")
def tokenizer():
    texts = f"{DRINKS} {DONE} {LOST} {GIVEN_UP} {PROMPT_TEMPLATE}"
    return train_tokenizer([World("toy", (HOME, RIVER), (), (Question("", texts, ("",)),), ())])


def turn(tokenizer, context: str, noise: ExpertNoise = NO_NOISE) -> str:
    expert = Thinker(tokenizer, [HOME, RIVER], [QUESTION], noise, seed=0)
    (generation,) = expert.generate([tokenizer.encode(context, add_special_tokens=False)], [99])
    return tokenizer.decode(generation.token_ids)


@pytest.mark.parametrize(("context", "expected"), [(PROMPT, NEED), (BORN, NOW), (DRINKS, DONE), (LOST, GIVEN_UP)])
def test_what_it_thinks_says_what_it_does(tokenizer, context: str, expected: str) -> None:
    assert turn(tokenizer, context) == expected


@pytest.mark.parametrize(
    ("noise", "context", "expected"),
    [
        (ExpertNoise(1, 0, 0, 0), PROMPT, NEED.replace(" born", "")),
        (ExpertNoise(0, 1, 0, 0), PROMPT, NEED.replace("hometown", "water").replace("born", "drinks")),
        (ExpertNoise(0, 1, 0, 0), BORN, NOW.replace("water", "hometown").replace("drinks", "born")),
        (ExpertNoise(0, 0, 0, 1), PROMPT, NEED),
        (ExpertNoise(0, 0, 0, 1), BORN, EARLY),
    ],
)
def test_each_mistake_is_in_the_thought_or_follows_it(
    tokenizer, noise: ExpertNoise, context: str, expected: str
) -> None:
    assert turn(tokenizer, context, noise) == expected


@pytest.fixture(scope="module")
def practised(invented: World, tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[EvaluatedTrajectory]]:
    """By hops, as the quickstart's policy saw it done."""
    return dict(split_by_hops(run_expert(invented, ThinkingWarmStart(), tmp_path_factory.mktemp("practised"))))


def test_without_mistakes_it_answers_with_the_real_search_engine(invented: World, tmp_path: Path) -> None:
    rows = run_expert(invented, ThinkingWarmStart(noise=NO_NOISE), tmp_path)
    assert mean_measure(rows, "exact_match") >= 0.95


def test_by_default_it_mostly_searches_once(practised: dict[int, list[EvaluatedTrajectory]]) -> None:
    assert mean_measure(practised[1], "searches") == 1.0
    searches = mean_measure(practised[2], "searches")
    assert searches is not None and 1.0 < searches < 1.5
