"""A small random Llama whose tokens are numbers, for benchmarks of time and memory."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def build_model(hidden_size: int, layers: int, vocabulary: int) -> LlamaForCausalLM:
    """Always the same weights; attention heads of 64. Token 0 pads and token 1 ends a text."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 64,
        pad_token_id=0,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def build_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """The number of a token is its text."""
    words = Tokenizer(models.WordLevel({str(i): i for i in range(vocabulary)}, unk_token="2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1", padding_side="left")
