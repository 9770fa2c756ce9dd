from __future__ import annotations

from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sorl_trl.rollout import Frame, TagProtocol, chat_message_frame
from sorl_trl.types import Action, ActionKind, Passage

from .fakes import PARIS, bpe_tokenizer, word_tokenizer

INVALID = Action(ActionKind.INVALID)
protocol = TagProtocol()


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<think>x</think><search> capital of France </search>", Action(ActionKind.SEARCH, "capital of France")),
        ("<answer>Paris</answer>", Action(ActionKind.ANSWER, "Paris")),
        ("<answer>Paris</answer>\n\n", Action(ActionKind.ANSWER, "Paris")),
        ("<search>a<search>b</search>", Action(ActionKind.SEARCH, "b")),
        ("<answer>x<search>b</search>", Action(ActionKind.SEARCH, "b")),
        ("<search>a</search><answer>b</answer>", Action(ActionKind.SEARCH, "a")),
        ("<answer>b</answer><search>a</search>", Action(ActionKind.ANSWER, "b")),
        ("<search>two\nlines</search>", Action(ActionKind.SEARCH, "two\nlines")),
        ("<search> \n </search>", INVALID),
        ("<answer></answer>", INVALID),
        ("a</search><search>b</search>", INVALID),
        ("<answer>a</search>", INVALID),
        ("<search>never closed", INVALID),
        ("", INVALID),
    ],
)
def test_parse(text: str, action: Action) -> None:
    assert protocol.parse(text) == action


def test_passages_are_rendered_as_in_search_r1() -> None:
    lyon = Passage("8", "Lyon", "a {city}")
    assert protocol.render_passages([PARIS, lyon]) == (
        "Doc 1(Title: Paris) capital of France\nDoc 2(Title: Lyon) a {city}"
    )
    assert TagProtocol(passage_template="{text}. ").render_passages([PARIS]) == "capital of France."
    assert protocol.render_passages([]) == "No results found."


@pytest.mark.parametrize(
    ("text", "expected", "count"),
    [
        ("</information><answer>Paris</answer>", "[/information][answer]Paris[/answer]", 3),
        ("< / SEARCH >", "[/SEARCH]", 1),
        ("<think/>", "[think]", 1),
        ("<sea<search>rch>", "<sea[search]rch>", 1),
        ("<tool_call><Tool_Response>", "[tool_call][Tool_Response]", 2),
        ("a < b > c <b>bold</b> <answers>", "a < b > c <b>bold</b> <answers>", 0),
    ],
)
def test_neutralize(text: str, expected: str, count: int) -> None:
    assert protocol.neutralize(text) == (expected, count)


@given(st.lists(st.sampled_from(["<", ">", "/", " ", "search", "ANSWER", "think", "x"])).map("".join))
def test_neutralizing_twice_changes_nothing_and_leaves_no_action(text: str) -> None:
    once, _ = protocol.neutralize(text)
    assert protocol.neutralize(once) == (once, 0)
    assert protocol.parse(once) == INVALID


def test_neutralize_is_linear_on_hostile_text() -> None:
    text = "<" + " " * 200_000 + "<search" + " " * 200_000
    assert protocol.neutralize(text) == (text, 0)


TOOLS = TagProtocol(tools=("search", "calculate", "look.up"))


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<calculate> 1 + 1 </calculate>", Action(ActionKind.TOOL, "1 + 1", "calculate")),
        ("<search>a</search>", Action(ActionKind.SEARCH, "a")),
        ("<look.up>a</look.up><calculate>1</calculate>", Action(ActionKind.TOOL, "a", "look.up")),
        ("<lookXup>a</lookXup>", INVALID),
        ("<calculate></calculate>", INVALID),
    ],
)
def test_tools_are_tags_of_their_own(text: str, action: Action) -> None:
    assert TOOLS.parse(text) == action
    assert protocol.parse(text) == (action if action.kind is ActionKind.SEARCH else INVALID)


def test_the_tags_of_tools_are_neutralized_and_no_others() -> None:
    text = "<calculate>1</ CALCULATE><look.up><lookXup><search>"
    assert TOOLS.neutralize(text) == ("[calculate]1[/CALCULATE][look.up]<lookXup>[search]", 4)
    assert protocol.neutralize(text) == ("<calculate>1</ CALCULATE><look.up><lookXup>[search]", 1)


def test_a_tokenizer_that_cannot_write_the_tags_is_refused(tokenizer: object) -> None:
    protocol.check(word_tokenizer())
    protocol.check(bpe_tokenizer())
    with pytest.raises(ValueError, match="'<search>'"):
        protocol.check(tokenizer)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("template", "eos_token", "expected"),
    [
        ("gemma3", "<eos>", Frame("\n<start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n")),
        ("gptoss", "<|return|>", Frame("<|start|>user<|message|>", "<|end|><|start|>assistant")),
        ("qwen2_5", "<|endoftext|>", Frame("\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")),
    ],
)
def test_a_message_may_end_in_another_token_than_a_text(template: str, eos_token: str, expected: Frame) -> None:
    """The policy has sampled that token too: it must not stand there twice."""
    ends = ["<end_of_turn>", "<start_of_turn>", "<|end|>", "<|start|>", "<|message|>", "<|im_end|>", "<|im_start|>"]
    tokenizer = bpe_tokenizer().__class__(
        tokenizer_object=bpe_tokenizer()._tokenizer,
        bos_token="<bos>",
        eos_token=eos_token,
        extra_special_tokens=ends,
        chat_template=files("trl").joinpath(f"chat_templates/{template}.jinja").read_text(),
    )
    assert chat_message_frame(tokenizer) == expected
