"""Shared by all tests: no hub, one thread, and a policy small enough to train in a second."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from tests.policies import WORDS, build_policy, word_tokenizer

torch.set_num_threads(1)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """Word level, 32 entries: pad 0, eos 1, unk 2, `</think>` 3, words w0…w27 from 4 on."""
    return word_tokenizer(WORDS)


@pytest.fixture
def policy() -> LlamaForCausalLM:
    return build_policy()
