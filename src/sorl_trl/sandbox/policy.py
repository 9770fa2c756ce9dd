"""A tiny policy and its tokenizer, made from scratch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sorl_trl.sandbox.expert import LIMITS, PROMPT_TEMPLATE, PROTOCOL, UNKNOWN
from sorl_trl.sandbox.world import World

PAD, EOS, UNK = "[PAD]", "[EOS]", "[UNK]"
TAGS = tuple(f"<{slash}{name}>" for name in ("search", "information", "answer") for slash in ("", "/"))


@dataclass(frozen=True)
class PolicyConfig:
    """The size of a Llama with tied embeddings. Ours: it learns to copy the atlas's names in 15 CPU-seconds."""

    hidden_size: int = 64
    layers: int = 2
    heads: int = 4


def train_tokenizer(worlds: Sequence[World], texts: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """Make a word-level tokenizer of all words of the worlds and of `texts`, with each protocol tag as one token."""
    return word_tokenizer((*_texts(worlds), *texts), TAGS)


def word_tokenizer(texts: Iterable[str], tags: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Make a word-level tokenizer of all words in the texts, lower-cased, with each tag as one token.

    Decoding puts one space between any two tokens.
    """
    words = sorted({word for text in texts for word in text.lower().split()})
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNK, *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNK))
    tokenizer.normalizer = Lowercase()
    tokenizer.pre_tokenizer = WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )
    # Not special: trainers skip special tokens when they decode for their logs, which must still show the actions.
    wrapped.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    return wrapped


def make_policy(
    tokenizer: PreTrainedTokenizerFast,
    config: PolicyConfig,
    seed: int,
    positions: int = 2 * (LIMITS.max_trajectory_tokens or 0),
) -> LlamaForCausalLM:
    """Make a randomly initialised Llama in evaluation mode. The global random state stays as it was.

    `positions` is how many tokens it can read, prompt and trajectory together.
    """
    llama = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=3 * config.hidden_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        # Larger than usual (ours): if names differ from the first step on, copying is learnt twice as fast.
        initializer_range=0.05,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(llama)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _texts(worlds: Sequence[World]) -> Iterable[str]:
    yield PROMPT_TEMPLATE.format(question="")
    yield from (UNKNOWN, PROTOCOL.no_results, PROTOCOL.search_failed, PROTOCOL.invalid_feedback)
    for world in worlds:
        yield from (passage.text for passage in world.passages)
        yield from (question.question for question in (*world.train, *world.evaluation))
        yield from (word for relation in world.relations for word in (relation.keyword, relation.noun))
