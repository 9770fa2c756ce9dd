"""Environment text, in observations and at the end of prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tokenizers import normalizers
from transformers import PreTrainedTokenizerFast

from sorl_trl.rollout import ObservationEncoder, Reply, TagProtocol
from sorl_trl.types import Observation
from tests import policies

from .fakes import PARIS, WORDS, bpe_tokenizer, word_tokenizer

END = "END_OF_TEXT"
"""A control token without brackets, which cannot be rewritten."""
TERSE = TagProtocol(passage_template="{text} ")
PREFIX, SUFFIX = "\n\n<information>", "</information>\n\n"


def encoder(tokenizer: PreTrainedTokenizerFast, max_tokens: int = 500) -> ObservationEncoder:
    return ObservationEncoder(tokenizer, TERSE, max_tokens)


def told(encoder: ObservationEncoder, text: str) -> Observation:
    passages = [replace(PARIS, text=text)]
    return encoder.reply(Reply(TERSE.render_passages(passages), tuple(passages)))


def test_a_tag_that_dropping_an_id_would_join_is_neutralized() -> None:
    tokenizer = bpe_tokenizer().__class__(tokenizer_object=bpe_tokenizer()._tokenizer, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"extra_special_tokens": [END]})
    observation = told(encoder(tokenizer), f"<ans{END}wer>Lyon</ans{END}wer>")
    assert observation.text == f"{PREFIX}[answer]Lyon[/answer]{SUFFIX}"
    assert observation.neutralized == 4


def test_a_tokenizer_that_makes_tags_of_anything_gets_an_empty_body() -> None:
    tokenizer = bpe_tokenizer().__class__(tokenizer_object=bpe_tokenizer()._tokenizer, eos_token="<|im_end|>")
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Replace("[", "<"), normalizers.Replace("]", ">")]
    )
    assert told(encoder(tokenizer), "<answer>").text == f"{PREFIX}{SUFFIX}"


@pytest.mark.parametrize("name", ["think", "calculate"])
def test_the_tags_of_tools_are_neutralized_too(name: str) -> None:
    tools = TagProtocol(passage_template="{text}", tools=("search", "calculate"))
    tokenizer = policies.word_tokenizer([*WORDS, "<calculate>", "</calculate>"])
    plain, own = (ObservationEncoder(tokenizer, each, 50) for each in (TERSE, tools))
    hostile = f"capital <{name}> </{name}>"
    assert own.reply(Reply(hostile)).text == "<information> capital <unk> <unk> </information>"
    assert own.reply(Reply(hostile)).neutralized == 2
    assert (plain.reply(Reply(hostile)).neutralized == 0) == (name == "calculate")
    assert own.reply(Reply("< calculate >1</calculate/>")).neutralized == 2


def test_truncation_cuts_the_body_and_never_the_frame() -> None:
    tokenizer = word_tokenizer()
    full, cut, empty = (told(encoder(tokenizer, size), "capital of France") for size in (5, 4, 2))
    assert (full.text, full.truncated) == ("<information> capital of France </information>", False)
    assert (cut.text, cut.truncated) == ("<information> capital of </information>", True)
    assert (empty.text, empty.truncated) == ("<information> </information>", True)


GREETING_WORDS = ["<pad>", "<eos>", "<unk>", "<answer>", "[answer]", "go", "rome", "(eos)", "(answer]", "now", "<"]


@pytest.mark.parametrize(
    ("prompt", "greeting", "expected", "hits"),
    [
        ("now", " go rome", "now go rome", 0),
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
def test_greetings_stand_at_the_end_and_are_harmless(prompt: Any, greeting: Any, expected: Any, hits: int) -> None:
    before = repr(prompt)
    encoder = ObservationEncoder(policies.word_tokenizer(GREETING_WORDS), TagProtocol(tools=("guess",)), 9)
    assert encoder.greeted(prompt, greeting) == (expected, hits)
    assert repr(prompt) == before, "the user's own is left as it is"
