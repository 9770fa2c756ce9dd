from __future__ import annotations

import pytest

from sorl_trl.rollout import ChatProtocol

from .fakes import bpe_tokenizer


@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>"])
def test_whatever_token_ends_a_message_is_no_part_of_it(end: str) -> None:
    """Checkpoints name several tokens, and of some (Gemma, Llama) the tokenizer's own is not the one they use."""
    protocol = ChatProtocol().in_chat(bpe_tokenizer())
    assert protocol.parse(f" [ls()]\n{end}").content == "[ls()]"
    assert protocol.parse(f"<|fim_prefix|>[ls()]{end}").content == "<|fim_prefix|>[ls()]"
