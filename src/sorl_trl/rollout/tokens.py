"""Reads a tokenizer: texts of tokens, and tokens that control a conversation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

_LOOKS_LIKE_CONTROL = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_IN_HARDLY_ANY_VOCABULARY = "ᚠ 𓀀 ꙮ"


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """The text of `token_ids` as it is: special tokens shown, spaces left alone."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def token_texts(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> list[str]:
    """What each token adds to the text; joined, they are the text. The last token of a character gets all of it."""
    texts: list[str] = []
    first = 0  # the first token of a character that is not complete yet
    for last in range(len(token_ids)):
        # Decode after the previous token, because some tokenizers drop a space at the beginning of a text.
        before = token_ids[max(first - 1, 0) : first]
        text = decode(tokenizer, [*before, *token_ids[first : last + 1]])[len(decode(tokenizer, before)) :]
        is_whole = not text.endswith("\ufffd") or last == len(token_ids) - 1
        texts.append(text if is_whole else "")
        first = last + 1 if is_whole else first
    return texts


def control_tokens(tokenizer: PreTrainedTokenizerBase, tag_names: Iterable[str]) -> dict[int, str]:
    """The tokens, by id, that untrusted text must not become.

    These are special tokens, except one that stands for unknown words; added tokens such as `<|fim_prefix|>` and
    `[TOOL_RESULTS]`, which some tokenizers do not declare special; and opening and closing tags of `tag_names` that
    are one token.
    """
    controls = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special or _LOOKS_LIKE_CONTROL.fullmatch(token.content):
            controls[token_id] = token.content
    vocabulary = tokenizer.get_vocab()
    for tag in (f"<{slash}{name}>" for name in tag_names for slash in ("", "/")):
        if tag in vocabulary:
            controls[vocabulary[tag]] = tag
    if _stands_for_unknown_words(tokenizer):
        controls.pop(tokenizer.unk_token_id, None)
    return controls


def _stands_for_unknown_words(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether plain text can become the unknown token.

    In byte-level vocabularies it never does. They name one nevertheless, and it is often the end-of-text token.
    """
    if tokenizer.unk_token_id in (None, tokenizer.eos_token_id, tokenizer.bos_token_id):
        return False
    return tokenizer.unk_token_id in tokenizer.encode(_IN_HARDLY_ANY_VOCABULARY, add_special_tokens=False)
