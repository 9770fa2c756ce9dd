"""A tokenizer and a random policy for the long prompts of agents."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import torch

from tests.policies import build_policy
from tests.tools import qwen_tokenizer


@cache
def brief_tokenizer() -> Any:
    """Has the words of the longest prompt, because a token per byte takes minutes."""
    prompt = files("smolagents").joinpath("prompts/code_agent.yaml").read_text()
    tokenizer: Any = qwen_tokenizer().train_new_from_iterator([prompt], vocab_size=1200, show_progress=False)
    tokenizer.chat_template = qwen_tokenizer().chat_template
    return tokenizer


def brief_policy(tokenizer: Any) -> Any:
    """What it says depends on what it reads. It mostly ends its message early, or some SDKs would raise an error."""
    policy = build_policy(vocab_size=len(tokenizer))
    policy.config.max_position_embeddings = 32768
    with torch.no_grad():
        for weights in policy.parameters():
            if weights.dim() > 1:
                weights *= 10
        policy.model.embed_tokens.weight[:, 0] = 0.5
        policy.lm_head.weight[tokenizer.eos_token_id] = 2.0 * torch.eye(1, policy.config.hidden_size)
    return policy
