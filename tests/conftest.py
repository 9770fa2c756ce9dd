"""Shared by all tests: no hub, one thread, and a policy small enough to train in a second."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
)

torch.set_num_threads(1)

WORDS = ["<pad>", "<eos>", "<unk>", "</think>", *(f"w{i}" for i in range(28))]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Word level, 32 entries: pad 0, eos 1, unk 2, `</think>` 3, words w0…w27 from 4 on."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def build_policy(seed: int = 0, vocab_size: int = len(WORDS)) -> LlamaForCausalLM:
    """A randomly initialized Llama with one layer of width 16."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def build_moe_policy(seed: int = 0) -> MixtralForCausalLM:
    """A randomly initialized mixture of two experts."""
    torch.manual_seed(seed)
    config = MixtralConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return MixtralForCausalLM(config)


@pytest.fixture
def policy() -> LlamaForCausalLM:
    return build_policy()
