"""What an environment adds to prompts, and that it forges nothing there."""

from __future__ import annotations

from typing import Any

import pytest

from sorl_trl.rollout import TagProtocol
from sorl_trl.rollout.observation import MessageSanitizer
from tests.policies import word_tokenizer
from tests.unit.rollout.fakes import bpe_tokenizer

WORDS = ["<pad>", "<eos>", "<unk>", "<answer>", "[answer]", "go", "rome", "(eos)", "(answer]", "now", "<"]


def greeter(max_tokens: int = 9) -> Greeter:
    return Greeter(word_tokenizer(WORDS), TagProtocol(tools=("guess",)), max_tokens)


@pytest.mark.parametrize(
    ("prompt", "said", "expected", "hits"),
    [
        ("now", " go rome", "now go rome", 0),
        ("now", None, "now", 0),
        ("<answer>", " go", "<answer> go", 0),
        ("now", " <answer>", "now [answer]", 1),
        ("now", " < guess >", "now [guess]", 1),
        ("now <", "answer>", "now <answer)", 1),
        ([{"role": "user", "content": "now"}], " <answer>", [{"role": "user", "content": "now [answer]"}], 1),
        (
            [{"role": "user", "content": [{"type": "text", "text": "now <"}]}],
            "answer>",
            [{"role": "user", "content": [{"type": "text", "text": "now <"}, {"type": "text", "text": "answer)"}]}],
            1,
        ),
    ],
)
def test_greetings_stand_at_the_end_and_are_harmless(prompt: Any, said: Any, expected: Any, hits: int) -> None:
    prompts, adding = [prompt], greeter()
    before = repr(prompts)
    assert adding.add(prompts, [said]) == [expected]
    assert adding.neutralized == hits
    assert repr(prompts) == before, "the user's own are left as they are"


def test_a_long_greeting_is_cut() -> None:
    assert greeter(max_tokens=2).add(["now "], ["go rome go rome"]) == ["now go rome"]


@pytest.mark.parametrize("said", ["สวัสดีครับ", "🎉" * 30])
def test_without_a_limit_nothing_is_cut_where_characters_are_several_tokens(said: str) -> None:
    assert Greeter(bpe_tokenizer()).add(["now "], [said]) == [f"now {said}"]


IMAGE = {"type": "image", "image": object()}
VIDEO = {"type": "video", "video": "now"}
USE, GO = {"type": "text", "text": "Use <answer>"}, {"type": "text", "text": "go"}


@pytest.mark.parametrize(
    ("own", "content", "heard"),
    [
        ("Use <answer>.", "Use <answer>. <answer>", "Use <answer>. [answer]"),
        ("", "<answer>", "[answer]"),
        ("Use <answer>", "<answer> anew", "[answer] anew"),
        ([USE, GO], [USE, GO, {"type": "text", "text": "<answer>"}], [USE, GO, {"type": "text", "text": "[answer]"}]),
        ("Use <answer>", [USE, IMAGE, GO], [USE, IMAGE, GO]),
        ("Use", [USE], [{"type": "text", "text": "Use [answer]"}]),
        ([VIDEO, USE], [VIDEO, USE, IMAGE], [VIDEO, USE, IMAGE]),
        ([USE], [USE, VIDEO], [USE, {"type": "text", "text": "{'type': 'video', 'video': 'now'}"}]),
        ([USE], [USE, {"type": "image", "image": "<answer>"}], [USE, {"type": "image", "image": "[answer]"}]),
        (
            [USE],
            [USE, {"type": "text", "text": "<ans"}, {"type": "text", "text": "wer>"}],
            [USE, {"type": "text", "text": "<ans"}, {"type": "text", "text": "wer)"}],
        ),
    ],
)
def test_what_is_added_to_a_message_is_harmless_and_the_rest_is_left(own: Any, content: Any, heard: Any) -> None:
    before = repr(content)
    assert Greeter(bpe_tokenizer()).clean(own, content) == heard
    assert repr(content) == before
