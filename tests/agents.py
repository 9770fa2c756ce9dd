"""A small agent: a random policy whose vocabulary is mostly actions, and a corpus to search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from sorl_trl.rollout import Frame, RolloutLimits, TagProtocol
from sorl_trl.search import BM25Index
from tests.conftest import build_policy

TAGS = ["<search>", "</search>", "<answer>", "</answer>", "<information>", "</information>"]
NAMES = ["rome", "oslo", "bern", "lima", "nothing", "failed", "invalid", "where"]
VOCABULARY = ["<pad>", "<eos>", "<unk>", *TAGS, *NAMES]

PROTOCOL = TagProtocol(
    passage_template="{text}",
    no_results="nothing",
    search_failed="failed",
    invalid_feedback="invalid",
    information_frame=Frame("<information>", "</information>"),
    feedback_frame=Frame(),
    message_frame=Frame(),
)
LIMITS = RolloutLimits(max_turns=2, max_turn_tokens=6, max_observation_tokens=6, max_trajectory_tokens=32, top_k=1)


def agent_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def agent_policy(seed: int = 0) -> LlamaForCausalLM:
    """Samples about uniformly: some of what it writes is a search or an answer, most is invalid."""
    return build_policy(seed, vocab_size=len(VOCABULARY))


def search_index(folder: Path) -> BM25Index:
    corpus = folder / "corpus.jsonl"
    rows = [{"id": name, "title": name, "content": f"where {name}"} for name in NAMES[:4]]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return BM25Index.build(corpus, folder / "index", show_progress=False)


def questions(count: int = 8) -> Dataset:
    rows: list[dict[str, Any]] = [
        {"prompt": f"where {NAMES[i % 4]}", "golden_answers": [NAMES[i % 4]]} for i in range(count)
    ]
    return Dataset.from_list(rows)
