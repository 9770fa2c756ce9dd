"""Policies small enough to train in a second, and a tokenizer whose tokens are words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

WORDS = ["<pad>", "<eos>", "<unk>", "</think>", *(f"w{i}" for i in range(28))]
SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}


def word_tokenizer(vocabulary: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token per word of `vocabulary`, which begins with `<pad>`, `<eos>` and `<unk>`."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def build_policy(seed: int = 0, vocab_size: int = len(WORDS)) -> LlamaForCausalLM:
    """A randomly initialized Llama with one layer of width 16."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **SHAPE))


def build_moe_policy(seed: int = 0) -> MixtralForCausalLM:
    """A randomly initialized mixture of two experts."""
    torch.manual_seed(seed)
    return MixtralForCausalLM(
        MixtralConfig(vocab_size=len(WORDS), num_key_value_heads=2, num_local_experts=2, **SHAPE)
    )
