"""A policy that now and then solves a task of the leaderboard."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from tests.policies import SHAPE
from tests.tools import qwen_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

SOLUTION = "ls(a=True)"
"""Of the first request of `multi_turn_base_1`."""


def talking_policy() -> LlamaForCausalLM:
    """Says the solution or `D.`, and sometimes breaks off: a Markov chain of bytes in the weights of a Llama."""
    tokenizer: Any = qwen_tokenizer()
    torch.manual_seed(0)
    width = 320  # of five heads, each as wide as vLLM wants them
    shape = {**SHAPE, "hidden_size": width, "num_attention_heads": 5, "num_key_value_heads": 5}
    policy = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape))
    follows = {"\n": "lD", **{said: then for text in (SOLUTION, "D.") for said, then in pairwise(text)}}
    with torch.no_grad():
        policy.model.embed_tokens.weight.copy_(torch.eye(len(tokenizer), width))
        policy.lm_head.weight.zero_()
        for said, then in follows.items():
            policy.lm_head.weight[tokenizer.encode(then), tokenizer.encode(said)[0]] = 0.8
        policy.lm_head.weight[tokenizer.eos_token_id, tokenizer.encode(").")] = 1.0
    return policy
