"""The atlas in plain English, and the expert that a language model imitates in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from sorl_trl.evaluation.agents import Agent, question_rows
from sorl_trl.evaluation.batches import run_batches
from sorl_trl.evaluation.plan import plan_batches
from sorl_trl.records.evaluated import EvaluatedTrajectory
from sorl_trl.rollout import Collector
from sorl_trl.sandbox import (
    CORPUS_FILE,
    NO_NOISE,
    PROTOCOL,
    LanguageModelWarmStart,
    World,
    WorldSize,
    build_atlas,
    expert_examples,
)
from sorl_trl.search import BM25Index

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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


def answered(
    world: World, tokenizer: PreTrainedTokenizerFast, config: LanguageModelWarmStart, folder: Path
) -> list[EvaluatedTrajectory]:
    index = BM25Index.build(world.write(folder) / CORPUS_FILE, folder / "index", show_progress=False)
    collector = Collector(tokenizer, index, PROTOCOL, replace(config.limits, max_trajectory_tokens=400))
    rows = question_rows(tokenizer, config.prompt_template, config.chat)
    agent = Agent(tokenizer, collector, config.expert(tokenizer, world), rows)
    batches = plan_batches({world.name: world.train}, num_samples=1, batch_size=4000)
    return [row for _, rows in run_batches(batches, agent, seed=0) for row in rows]


def mean(rows: list[EvaluatedTrajectory], measure: str, hops: int) -> float:
    values = [float(row.measures[measure] or 0) for row in rows if row.question.metadata["hops"] == hops]
    return sum(values) / len(values)


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
    rows = answered(plain, tokenizer, LanguageModelWarmStart(noise=NO_NOISE), tmp_path)
    assert mean(rows, "exact_match", 1) >= 0.9
    assert mean(rows, "exact_match", 2) >= 0.8


def test_who_is_imitated_stops_early(plain: World, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    rows = answered(plain, tokenizer, LanguageModelWarmStart(), tmp_path)
    assert mean(rows, "searches", 1) == 1.0
    assert 1.2 < mean(rows, "searches", 2) < 1.6
    assert mean(rows, "exact_match", 2) < 0.5


def test_a_prompt_is_a_message(plain: World, tokenizer: PreTrainedTokenizerFast) -> None:
    config = LanguageModelWarmStart(limits=replace(LanguageModelWarmStart.limits, max_trajectory_tokens=400))
    (example,) = expert_examples(plain, tokenizer, 1, config)
    text = tokenizer.decode(list(example.input_ids))
    assert text.startswith("<|im_start|>user\nAnswer the question.")
    learnt = tokenizer.decode([token for token in example.labels if token >= 0])
    assert learnt.startswith("<search>") and learnt.endswith("</answer>")
