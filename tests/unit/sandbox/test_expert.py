from __future__ import annotations

import pytest

from sorl_trl.qa import Question
from sorl_trl.sandbox import NO_NOISE, PROMPT_TEMPLATE, ScriptedExpert, World, train_tokenizer

from .helpers import HOME, PROMPT, QUESTION, RIVER

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
