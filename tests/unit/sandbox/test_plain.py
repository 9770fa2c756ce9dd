"""The atlas in plain English, and the expert that a language model imitates in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from sorl_trl.sandbox import NO_NOISE, LanguageModelWarmStart, World, WorldSize, build_atlas, expert_examples

from .helpers import mean, run_expert

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LONGER = replace(LanguageModelWarmStart.limits, max_trajectory_tokens=400)


@pytest.fixture(scope="module")
def plain() -> World:
    return build_atlas(0, WorldSize(300, 10), plain=True)


@pytest.fixture(scope="module")
def tokenizer(plain: World) -> PreTrainedTokenizerFast:
    """Byte pairs and ChatML, as of the models that people fine-tune."""
    bytes_ = ByteLevelBPETokenizer()
    texts = [passage.text for passage in plain.passages]
    bytes_.train_from_iterator(texts, 600, special_tokens=["<|im_start|>", "<|im_end|>"], show_progress=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=bytes_._tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    fast.chat_template = CHATML
    return fast


def test_it_says_what_the_atlas_says(plain: World) -> None:
    texts = {passage.text for passage in plain.passages}
    assert {
        "Marseille is a city in the country of France.",
        "The capital of France is Paris.",
        "The calling code of Italy is 39.",
        "One neighbour of Portugal is Spain.",
    } <= texts
    assert all(question.question.startswith("What is the ") for question in plain.train)


def test_who_searches_on_answers(plain: World, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    rows = run_expert(plain, LanguageModelWarmStart(noise=NO_NOISE, limits=LONGER), tmp_path, tokenizer)
    assert mean(rows, "exact_match", 1) >= 0.9
    assert mean(rows, "exact_match", 2) >= 0.8


def test_who_is_imitated_stops_early(plain: World, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    rows = run_expert(plain, LanguageModelWarmStart(limits=LONGER), tmp_path, tokenizer)
    assert mean(rows, "searches", 1) == 1.0
    assert 1.2 < mean(rows, "searches", 2) < 1.6
    assert mean(rows, "exact_match", 2) < 0.5


def test_a_prompt_is_a_message(plain: World, tokenizer: PreTrainedTokenizerFast) -> None:
    (example,) = expert_examples(plain, tokenizer, 1, LanguageModelWarmStart(limits=LONGER))
    text = tokenizer.decode(list(example.input_ids))
    assert text.startswith("<|im_start|>user\nAnswer the question.")
    learnt = tokenizer.decode([token for token in example.labels if token >= 0])
    assert learnt.startswith("<search>") and learnt.endswith("</answer>")
