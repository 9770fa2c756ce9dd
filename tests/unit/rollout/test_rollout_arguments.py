from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from sorl_trl.rollout import PROTOCOLS, Frame, RolloutArguments, RolloutLimits

from .fakes import bpe_tokenizer


def test_every_argument_reaches_the_limits() -> None:
    arguments = RolloutArguments(max_turns=1, max_turn_tokens=2, max_observation_tokens=3, search_top_k=4)
    assert arguments.limits(5) == RolloutLimits(1, 2, 3, 5, 4)
    with pytest.raises(ValueError, match="`max_trajectory_tokens` is 0, but must be a whole number, at least 1"):
        arguments.limits(0)


def test_a_chat_model_gets_the_messages_of_its_template() -> None:
    tokenizer = bpe_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}"
    protocol = RolloutArguments(chat=True).tag_protocol(tokenizer)
    assert protocol.message_frame == Frame(" [user] ", " ")
    terse = RolloutArguments(chat=True, protocol="terse").tag_protocol(tokenizer)
    assert terse == replace(PROTOCOLS["terse"], message_frame=Frame(" [user] ", " ")), (
        "or it would speak outside of any"
    )
    assert RolloutArguments(protocol="terse").tag_protocol(tokenizer) == PROTOCOLS["terse"]
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "hello"
    with pytest.raises(ValueError, match="the chat template renders 'hello'"):
        RolloutArguments(chat=True).tag_protocol(tokenizer)


def test_a_trajectory_may_be_as_long_as_the_trainers_completions() -> None:
    assert RolloutLimits().within(7) == RolloutLimits(max_trajectory_tokens=7)
    assert RolloutLimits(max_trajectory_tokens=5).within(7).max_trajectory_tokens == 5
    with pytest.raises(ValueError, match=r"`limits.max_trajectory_tokens` is 8, more than .* of 7"):
        RolloutLimits(max_trajectory_tokens=8).within(7)
