"""What a language model imitates in the plain atlas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sorl_trl.sandbox import LANGUAGE_MODEL, NO_NOISE, World, WorldSize, build_atlas, expert_examples, teach

from .helpers import mean, run_expert

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LONGER = replace(LANGUAGE_MODEL, limits=replace(LANGUAGE_MODEL.limits, max_trajectory_tokens=400))


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


def test_who_searches_on_answers(plain: World, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    rows = run_expert(plain, replace(LONGER, noise=NO_NOISE), tmp_path, tokenizer)
    assert mean(rows, "exact_match", 1) >= 0.9
    assert mean(rows, "exact_match", 2) >= 0.8


def test_who_is_imitated_stops_early(plain: World, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    rows = run_expert(plain, LONGER, tmp_path, tokenizer)
    assert mean(rows, "searches", 1) == 1.0
    assert 1.2 < mean(rows, "searches", 2) < 1.6
    assert mean(rows, "exact_match", 2) < 0.5


def test_a_prompt_is_a_message(plain: World, tokenizer: PreTrainedTokenizerFast) -> None:
    (example,) = expert_examples(plain, tokenizer, 1, LONGER)
    text = tokenizer.decode(list(example.input_ids))
    assert text.startswith("<|im_start|>user\nAnswer the question.")
    learnt = tokenizer.decode([token for token in example.labels if token >= 0])
    assert learnt.startswith("<search>") and learnt.endswith("</answer>")


@pytest.mark.trains
@pytest.mark.parametrize("words", [700, 40_000])
def test_embeddings_that_are_most_of_a_model_are_not_trained(
    plain: World, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, words: int
) -> None:
    """700 words are a small part of this model, and 40,000 are most of it."""
    config = replace(LONGER, trajectories=2, steps=1, batch_size=2)
    shape = {"hidden_size": 64, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=words, **shape))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    taught = AutoModelForCausalLM.from_pretrained(teach(str(tmp_path / "model"), plain, tmp_path / "taught", config))
    before, after = model.state_dict(), taught.state_dict()
    still = {name for name, weight in after.items() if torch.equal(weight, before[name])}
    assert still == ({"lm_head.weight", "model.embed_tokens.weight"} if words == 40_000 else set())
