"""How the calls of each SDK continue their trajectory: what the policy wrote is read again, token by token."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import pytest

from tests.endpoint import Ran, run_agent
from tests.sdks.agents import AGENTS, IN_NODE, SENDS_CALLS, with_reward
from tests.tools import qwen_tokenizer

EXTENDED, SPLICED, NEW = (2, 0, 0), (0, 2, 0), (0, 0, 2)
TOKENS = {
    "qwen2_5": ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
    "qwen3": ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"],
    "llama3_2": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"],
}
STYLES = {
    "as the template": EXTENDED,
    "other tokens": EXTENDED,
    "compact JSON": SPLICED,
    "spaced JSON": SPLICED,
    "escapes": SPLICED,
    "text before": EXTENDED,
    "two calls": EXTENDED,
    "newline": SPLICED,
    "thoughts": EXTENDED,
    "follow-up": (3, 0, 0),
    "follow-up, thoughts": (2, 0, 1),  # Qwen3's template drops thoughts before the last question
}
UNKNOWN_TO_LLAMA = ("text before", "two calls", "newline")
"""Its template shows one call and nothing else in a message."""

THINKING = ("qwen3", "<think>\nI think.\n</think>\n\n", NEW)


@cache
def family_tokenizer(family: str) -> Any:
    """A few merges of bytes, with a family's control tokens and chat template."""
    words = "Where is Oslo? Tromsø, Bergen. I should look. search query name arguments"
    tokenizer: Any = qwen_tokenizer().train_new_from_iterator([words] * 9, vocab_size=320, show_progress=False)
    if family.startswith("llama"):
        tokenizer.add_special_tokens({"additional_special_tokens": TOKENS[family]})
        tokenizer.bos_token, tokenizer.eos_token = "<|begin_of_text|>", "<|eot_id|>"
    else:
        tokenizer.add_tokens(TOKENS[family])
    tokenizer.chat_template = files("trl").joinpath(f"chat_templates/{family}.jinja").read_text()
    return tokenizer


def written(family: str, style: str, number: int) -> str:
    """A call, at first, and then an answer."""
    thoughts = f"<think>\nStep {number}: I should look.\n</think>\n\n" if "thoughts" in style else ""
    if number >= 2:
        return f"{thoughts}Oslo is in Norway."
    query = {"escapes": rf'{{"query": "Troms\u00f8 {number}"}}', "compact JSON": f'{{"query":"Oslo {number}"}}'}
    query["spaced JSON"] = f'{{ "query" : "Oslo {number}" }}'
    call = _call(family, query.get(style, f'{{"query": "Oslo {number}"}}'))
    if style == "two calls":
        call += "\n" + _call(family, f'{{"query": "Bergen {number}"}}')
    return thoughts + ("I should look.\n" if style == "text before" else "") + call + "\n" * (style == "newline")


def _call(family: str, arguments: str) -> str:
    if family.startswith("llama"):
        return f'{{"name": "search", "parameters": {arguments}}}'
    return f'<tool_call>\n{{"name": "search", "arguments": {arguments}}}\n</tool_call>'


def letter_by_letter(tokenizer: Any, text: str) -> list[int]:
    """Other tokens of the same text."""
    known, found = tokenizer.added_tokens_encoder, list[int]()
    for token in tokenizer.tokenize(text):
        parts = [token] if token in known else [*token]
        found += tokenizer.convert_tokens_to_ids(parts)
    assert tokenizer.decode(found) == text
    return found


def run(name: str, tokenizer: Any, search: Any, say: Any, **example: Any) -> Ran:
    """Have an agent answer where Oslo is; its reward is 1 if it says so."""
    agent = with_reward(AGENTS[name], search, lambda answer: float("Norway" in answer))
    return run_agent(agent, {"question": "Where is Oslo?", **example}, tokenizer, say)


CASES = [(name, family) for name in SENDS_CALLS for family in TOKENS if family == "qwen3" or name not in IN_NODE]


@pytest.mark.parametrize(("name", "family"), CASES)
def test_what_the_policy_wrote_stays_as_it_is(name: str, family: str, search: Any) -> None:
    tokenizer, counts, expected = family_tokenizer(family), dict[str, Any](), dict[str, Any]()
    for style, those in STYLES.items():
        if ("thoughts" in style and family != "qwen3") or (style in UNKNOWN_TO_LLAMA and family == "llama3_2"):
            continue

        def say(read: str, number: int, style: str = style) -> Any:
            text = written(family, style, number)
            return letter_by_letter(tokenizer, text) if style == "other tokens" else text

        ran = run(name, tokenizer, search, say, follow_up="Say it again." if "follow-up" in style else None)
        assert ran.rewards == {"reward": 1.0}, style
        assert "Oslo is in Norway." in ran.read[1] or style == "escapes"
        counts[style], expected[style] = ran.counts, those
    assert counts == expected


@pytest.mark.parametrize(("family", "thoughts", "counts"), [*((each, "", EXTENDED) for each in TOKENS), THINKING])
def test_code_agents_extend_their_context(family: str, thoughts: str, counts: Any, search: Any) -> None:
    """But not with thoughts: observations are users' messages, before which Qwen3's template drops them."""

    def say(read: str, number: int) -> str:
        code = "final_answer('in Norway')" if number == 2 else f"print(search(query='Oslo {number}'))"
        return f"{thoughts}Thought: I should look.\n<code>\n{code}\n</code>"

    ran = run("smolagents, CodeAgent", family_tokenizer(family), search, say)
    assert (ran.rewards, ran.counts) == ({"reward": 1.0}, counts)
    assert "Oslo is in Norway." in ran.read[1]


@pytest.mark.parametrize("family", TOKENS)
def test_an_sdk_that_rewrites_calls_as_text_begins_new_contexts(family: str, search: Any) -> None:
    def say(read: str, number: int) -> str:
        if number < 2:
            return written(family, "as the template", number)
        answer = _call(family, '{"answer": "in Norway"}')
        return answer.replace('"search"', '"final_answer"')

    ran = run("smolagents, ToolCallingAgent", family_tokenizer(family), search, say)
    assert (ran.rewards, ran.counts) == ({"reward": 1.0}, NEW)
    assert len({segment.context for segment in ran.trajectory.segments}) == 3


def dspy_turn(**fields: str) -> str:
    """A turn as dspy tells the policy to write it."""
    return "".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in fields.items()) + "[[ ## completed ## ]]"


DSPY_SEARCHES = dspy_turn(next_thought="I should look.", next_tool_name="search", next_tool_args='{"query": "Oslo"}')


def test_an_sdk_that_writes_its_history_as_text_begins_new_contexts(search: Any) -> None:
    """Each request of dspy is a system prompt and one message: what the policy wrote is a quotation in it."""
    end = dspy_turn(next_thought="I know.", next_tool_name="finish", next_tool_args="{}")
    turns = [DSPY_SEARCHES, end, dspy_turn(reasoning="I have looked.", answer="in Norway")]
    ran = run("dspy", family_tokenizer("qwen2_5"), search, lambda read, number: turns[number])
    assert (ran.rewards, ran.counts) == ({"reward": 1.0}, NEW)
    assert "Oslo is in Norway." in ran.read[1]
