"""Policies small enough to train in a second, and a tokenizer whose tokens are words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

from sorl_trl.rollout import Engine, Generation, TurnRequest, generate_turns

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


DIGITS = ("1", "2", "3")
CHAT = "{% for m in messages %}{{ m['content'] + ' <eos> ' }}{% endfor %}"
"""A chat template for tokenizers of words."""


def acting_tokenizer(tools: Sequence[str]) -> PreTrainedTokenizerFast:
    """Knows opening tags, closing tags and digits; every other word is unknown."""
    tags = [f"<{slash}{name}>" for slash in ("", "/") for name in (*tools, "answer")]
    return word_tokenizer(["<pad>", "<eos>", "<unk>", *tags, *DIGITS])


def acting_policy(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Writes a tag, mostly, then a digit, then what closes some tag: a Markov chain in the weights of a Llama."""
    policy, width = build_policy(vocab_size=len(tokenizer)), SHAPE["hidden_size"]
    words = tokenizer.get_vocab()
    assert len(words) <= width, "each word has a dimension of its own"
    closing = [i for word, i in words.items() if word.startswith("</")]
    digits = [words[digit] for digit in DIGITS]
    opening = [i for i in words.values() if i > words["<unk>"] and i not in (*closing, *digits)]
    with torch.no_grad():
        policy.model.embed_tokens.weight.copy_(torch.eye(len(words), width))
        policy.lm_head.weight.zero_()
        for i in words.values():
            follows = digits if i in opening else closing if i in digits else opening
            policy.lm_head.weight[follows, i] = 6 / width**0.5
    return policy


def build_moe_policy(vocab_size: int = len(WORDS)) -> MixtralForCausalLM:
    """A randomly initialized mixture of two experts, which can be in float64."""
    torch.manual_seed(0)
    policy = MixtralForCausalLM(
        MixtralConfig(vocab_size=vocab_size, num_key_value_heads=2, num_local_experts=2, **SHAPE)
    )
    policy.set_experts_implementation("eager")  # the default's kernel does not take float64
    return policy


def play_turns(engine: Engine, requests: Sequence[TurnRequest]) -> list[Generation]:
    """What comes of requests of rows 0, 1, …, in a rollout of their own."""
    engine.open(len(requests))
    ended: dict[int, Generation] = {}
    for request in requests:
        engine.submit(request)
    while not engine.idle:
        ended |= dict(engine.poll())
    engine.close()
    return [ended[row] for row in range(len(requests))]


def take_turns(
    engine: Engine, contexts: Sequence[Sequence[int]], limits: Sequence[int], rows: Sequence[int] | None = None
) -> list[Generation]:
    """One turn each of `rows`, by default the first ones, in a rollout of its own."""
    engine.open(len(contexts))
    try:
        return generate_turns(engine, contexts, limits, rows)
    finally:
        engine.close()
