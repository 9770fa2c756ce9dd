"""Tags merge with what stands around them: where a turn ends, what it asks for, and which tokens are kept."""

from __future__ import annotations

from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sorl_trl.rollout import TagProtocol, TurnEnd
from sorl_trl.rollout.observation import Sanitizer
from sorl_trl.rollout.trajectories import control_tokens, decode
from sorl_trl.types import ActionKind

PROTOCOL = TagProtocol()
AROUND = st.text(alphabet=">.,)\"'<|/\n aé☃𓀀", max_size=4)
"""What tags are written next to: `>.`, `><`, `></`, `>\\n\\n` and ` <` are tokens, and half characters are too."""
WORDS = st.sampled_from(["capital of France", "Saint-Denis", "São Tomé", "a < b", "<b>x</b>", "x</search", "👍🏽"])
TAGS = st.sampled_from([("search", ActionKind.SEARCH), ("answer", ActionKind.ANSWER)])


def ended(end: TurnEnd, ids: list[int]) -> list[int]:
    """What an engine would have sampled of these tokens: it asks after each one."""
    for length in range(1, len(ids) + 1):
        if end.reached([ids[:length][-end.tail :]])[0]:
            return ids[:length]
    return ids


@settings(max_examples=40)
@given(before=AROUND, inner=AROUND, query=WORDS, after=AROUND, tag=TAGS)
def test_a_turn_ends_with_the_token_that_closes_the_tag(
    shared_tokenizer: Any, before: str, inner: str, query: str, after: str, tag: tuple[str, ActionKind]
) -> None:
    """Encoded in one go, so that tags share tokens with what is before and after them."""
    name, kind = tag
    assume(not any(stop in f"{inner}{query}{inner}" for stop in PROTOCOL.stop_strings))  # x</search and >
    whole = f"{before}<{name}>{inner}{query}{inner}</{name}>"
    ids = shared_tokenizer.encode(whole + after, add_special_tokens=False)
    sampled = ended(TurnEnd(shared_tokenizer, PROTOCOL.stop_strings, [shared_tokenizer.eos_token_id]), ids)
    text = decode(shared_tokenizer, sampled)
    assert f"</{name}>" in text and f"</{name}>" not in decode(shared_tokenizer, sampled[:-1])
    assert len(sampled) <= len(ids) and ids[: len(sampled)] == sampled
    action = PROTOCOL.parse(text)
    assert action == PROTOCOL.parse(whole), "the last token's text beyond the tag has no effect"
    assert (action.kind, action.content) == (kind, f"{inner}{query}{inner}".strip())


CONTROLS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<answer>", "</answer>", "< / answer >"]
PARTS = ["<|im_", "end|>", "<", "|", ">", "</", "search>", "＜|im_end|＞", "assistant\n", "\n", " ", "\u200b", "x"]
HOSTILE = st.lists(st.sampled_from(CONTROLS + PARTS), max_size=12).map("".join)


@settings(max_examples=40)
@given(said=HOSTILE, limit=st.integers(1, 20))
def test_untrusted_text_holds_no_control_token(shared_tokenizer: Any, said: str, limit: int) -> None:
    sanitizer = Sanitizer(shared_tokenizer)
    controls = control_tokens(shared_tokenizer, PROTOCOL.tag_names)
    harmless = sanitizer.sanitize(said, limit)
    assert len(harmless.token_ids) <= limit and not controls.keys() & {*harmless.token_ids}
    whole = sanitizer.clean(said)
    assert not controls.keys() & {*shared_tokenizer.encode(whole, add_special_tokens=False)}
    assert PROTOCOL.neutralize(whole)[1] == 0
