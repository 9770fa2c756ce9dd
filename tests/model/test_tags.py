"""Tags merge with what stands around them: where a turn ends, what it asks for, and which tokens are kept."""

from __future__ import annotations

from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sorl_trl.rollout import Collector, Generation, RolloutLimits, TagProtocol, TurnEnd, assemble
from sorl_trl.rollout.observation import Sanitizer
from sorl_trl.rollout.tokens import control_tokens, decode
from sorl_trl.types import ActionKind, Turn
from tests.model.helpers import FORGED, HostileSearch
from tests.unit.rollout.fakes import ScriptedGenerator

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
    assert action == PROTOCOL.parse(whole), "what the last token holds beyond the tag says nothing"
    assert (action.kind, action.content) == (kind, f"{inner}{query}{inner}".strip())


@settings(max_examples=40)
@given(pieces=st.lists(st.tuples(AROUND, WORDS, AROUND), min_size=1, max_size=3))
def test_what_was_sampled_is_what_is_trained_on(shared_tokenizer: Any, pieces: list[tuple[str, str, str]]) -> None:
    """The last token of a turn goes on behind its tag, and the observation follows that: no id is another's."""
    texts = [f"{before}<search>{query}</search>{after}" for before, query, after in pieces]
    texts.append("Thus.<answer>Paris</answer>.")
    end = TurnEnd(shared_tokenizer, PROTOCOL.stop_strings, [shared_tokenizer.eos_token_id])
    turns = [ended(end, shared_tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    script = {7: [Generation(tuple(ids), None, True) for ids in turns]}
    limits = RolloutLimits(max_turns=5, max_observation_tokens=60)
    generator = ScriptedGenerator(script)
    (trajectory,) = Collector(shared_tokenizer, HostileSearch(), limits=limits).collect([[7, 8]], generator)
    assert [list(turn.token_ids) for turn in trajectory.turns] == turns
    (laid,) = assemble([trajectory])
    assert laid.completion_ids == [token for each in trajectory.segments for token in each.token_ids]
    spans = [
        [t for t, turn in zip(laid.completion_ids, laid.turn_ids, strict=True) if turn == k] for k in range(len(turns))
    ]
    assert spans == turns
    # Each turn was generated from exactly the ids before it.
    before = [(7, 8)]
    for segment in trajectory.segments:
        before.append((*before[-1], *segment.token_ids))
    asked = [before[i] for i, segment in enumerate(trajectory.segments) if isinstance(segment, Turn)]
    assert [contexts[0] for contexts in generator.calls] == asked
    controls = control_tokens(shared_tokenizer, ())
    assert not any(token in controls for seen in trajectory.observations for token in seen.token_ids)


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


@settings(max_examples=40)
@given(question=HOSTILE)
def test_a_question_holds_no_control_token(shared_tokenizer: Any, question: str) -> None:
    """Of a chat's prompt there are as many as of a question that says nothing."""
    clean = Sanitizer(shared_tokenizer).clean
    asked, plain = (
        shared_tokenizer.apply_chat_template(
            [{"role": "user", "content": f"Question: {text}"}], add_generation_prompt=True, return_dict=False
        )
        for text in (clean(question + FORGED), "x")
    )
    controls = control_tokens(shared_tokenizer, ()).keys()
    assert [i for i in asked if i in controls] == [i for i in plain if i in controls]
