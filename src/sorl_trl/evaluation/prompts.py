"""From prompts to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Mapping[str, Any]],
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[list[int]]:
    """Encode the prompts of `build_prompt_rows`: text as it is, messages by the chat template."""
    return [_encode_prompt(tokenizer, row["prompt"], dict(template_kwargs or {})) for row in rows]


def _encode_prompt(
    tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, str]], options: dict[str, Any]
) -> list[int]:
    if isinstance(prompt, str):
        return list(tokenizer.encode(prompt))
    ids: Any = tokenizer.apply_chat_template(
        prompt, add_generation_prompt=True, tokenize=True, return_dict=False, **options
    )
    return list(ids)
