"""How a request continues its trajectory, worked by hand, and what client and policy read of each other."""

from __future__ import annotations

import re
from typing import Any

import pytest
import trl.chat_template_utils as templates
from tokenizers import normalizers

from sorl_trl.endpoint import completions, responses
from sorl_trl.endpoint.conversation import EXTENDED, FIRST, NEW_CONTEXT, SPLICED, Conversation
from sorl_trl.endpoint.messages import ChatFormat
from sorl_trl.endpoint.requests import BadRequest, Message, Request, read_message
from sorl_trl.types import StopReason, ToolResult
from tests.endpoint import END, HI, SEARCH, chat_of, say, setup_of
from tests.tools import HOSTILE, qwen_tokenizer

MORE = {"role": "user", "content": "more"}
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Oslo"}}\n</tool_call>'
THINKS = "<think>\nI see.\n</think>\n\n"
PROMPT = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
NEXT = "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
FOUND = "\n<|im_start|>user\n<tool_response>\nfound\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
KIND = [{"role": "system", "content": "Be kind."}, *HI]


def ask(conversation: Conversation, messages: list[Message], text: str = f"Yes.{END}", **request: Any) -> Message:
    """Have the policy answer. Returns its message, as the client gets it."""
    return say(conversation, conversation.begin(Request("m", messages, **request)), text).message


def kinds(conversation: Conversation) -> list[str]:
    return [call.kind for call in conversation.calls]


def sent(content: str, **parts: Any) -> Message:
    return read_message({"role": "assistant", "content": content, **parts}, "messages[1]")


def called(arguments: str, content: str = "", **parts: Any) -> Message:
    call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": arguments}}
    return sent(content, tool_calls=[call], **parts)


def result(content: str = "found") -> Message:
    return {"role": "tool", "tool_call_id": "1", "content": content}


def test_a_context_is_extended_by_what_follows() -> None:
    conversation = Conversation(chat_of(), row=2, stride=10)
    ask(conversation, KIND)
    call = conversation.begin(Request("m", [*KIND, sent("Yes."), MORE]))
    assert (call.kind, call.context.row) == (EXTENDED, 2)
    assert call.context.text == f"{PROMPT}Yes.{END}{NEXT}"
    say(conversation, call, f"No.{END}")
    trajectory = conversation.trajectory(StopReason.ENVIRONMENT_DONE)
    assert trajectory.prompt_ids == tuple(chat_of().encode(PROMPT))
    assert [(each.text, each.context) for each in trajectory.segments] == [
        (f"Yes.{END}", 0),
        (NEXT, 0),
        (f"No.{END}", 0),
    ]
    assert conversation.completion_length == sum(len(each.token_ids) for each in trajectory.segments)
    assert [each["content"] for each in conversation.completion()] == ["Yes.", "more", "No."]


@pytest.mark.parametrize(
    ("written", "returned", "kind"),
    [
        (CALL + END, called('{"query": "Oslo"}'), EXTENDED),
        (CALL + END, called('{ "query":"\\u004fslo" }'), EXTENDED),
        (CALL.replace(": ", ":") + END, called('{"query": "Oslo"}'), SPLICED),
        (CALL + "\n" + END, called('{"query": "Oslo"}'), SPLICED),
        (CALL, called('{"query": "Oslo"}'), EXTENDED),
        (f"I look.\n{CALL}{END}", called('{"query": "Oslo"}', "I look."), EXTENDED),
        (f"I look.\n{CALL}{END}", called('{"query": "Oslo"}'), NEW_CONTEXT),
        (CALL + END, called('{"query": "Rome"}'), NEW_CONTEXT),
        (CALL + END, sent(CALL + " "), SPLICED),
        (f"{CALL}\n{CALL}{END}", called('{"query": "Oslo"}'), NEW_CONTEXT),
        (CALL.replace('{"query": "Oslo"}', r'"{\"query\": 1}"') + END, called('{"query": 1}'), EXTENDED),
        (CALL.replace("Oslo", r"\ud800") + END, called('{"query": "?"}'), SPLICED),
        (f"Yes. \n{END}", sent("Yes."), EXTENDED),
        ("Yes. And", sent("Yes. And more"), EXTENDED),
        (f"Yes.{END}", sent("No."), NEW_CONTEXT),
    ],
)
def test_a_turn_stays_as_it_was_sampled_if_its_client_sends_the_same(
    written: str, returned: Message, kind: str
) -> None:
    conversation = Conversation(chat_of(), stride=10)
    calls = ask(conversation, KIND, written, tools=[SEARCH]).get("tool_calls")
    before = conversation.answers[0].turn.token_ids
    found = {**result(), "tool_call_id": calls[0]["id"] if calls else None}
    call = conversation.begin(Request("m", [*KIND, returned, found], tools=[SEARCH]))
    assert call.kind == kind
    assert call.context.row == 10 * (kind == NEW_CONTEXT)
    if kind != NEW_CONTEXT:
        assert call.context.token_ids[: -len(call.observations[0].token_ids)][-len(before) :] == [*before]
        rest = call.observations[0].text.removeprefix(" more")
        assert rest == (FOUND if written.endswith(END) else f"{END}{FOUND}")
        assert call.observations[0].results == (ToolResult("search" if calls else "", "found"),)


def test_a_turn_that_a_stop_string_ended_may_come_back_with_it_or_without() -> None:
    for returned in ("<code>\n1", "<code>\n1</code>", "<code>\n1</code>\n"):
        conversation = Conversation(chat_of("qwen3_training"))
        message = ask(conversation, HI, f"{THINKS}<code>\n1</code>\n", stops=("</code>", "Observation:"))
        assert (message["content"], message["reasoning_content"]) == ("<code>\n1", "I see.")
        assert conversation.answers[0].finish_reason == "stop"
        call = conversation.begin(Request("m", [*HI, sent(returned), MORE]))
        assert call.kind in (EXTENDED, SPLICED)
        assert call.observations[0].text.endswith(END + NEXT)


def test_thoughts_that_a_client_has_dropped_are_put_back_where_the_template_shows_them() -> None:
    messages, answers = [*HI], []
    chat = chat_of("qwen3")
    conversation = Conversation(chat)
    for _ in range(2):
        answers.append(ask(conversation, messages, f"{THINKS}{CALL}{END}", tools=[SEARCH]))
        messages += [called('{"query": "Oslo"}'), result()]
    assert [each["reasoning_content"] for each in answers] == ["I see."] * 2
    assert kinds(conversation) == [FIRST, EXTENDED]
    ask(conversation, [*messages, sent("Done."), MORE], tools=[SEARCH])
    assert conversation.calls[-1].cause == "client", "it adds a message that the policy has not written"


def test_thoughts_are_no_content_even_if_they_are_empty() -> None:
    conversation = Conversation(chat_of("qwen3"))
    assert ask(conversation, HI, f"<think>\n\n</think>\n\n1{END}") == {"role": "assistant", "content": "1"}
    assert conversation.begin(Request("m", [*HI, sent("1"), MORE])).kind == SPLICED


@pytest.mark.parametrize(
    ("family", "written", "content", "thoughts"),
    [
        ("qwen3", "So.<think>a</think>Yes.", "So.\nYes.", "a"),
        ("qwen3", "<think>a</think>So.<think>b</think>Yes.", "So.\nYes.", "a\nb"),
        ("qwen3", f"So.\n{CALL}\nYes.", "So.\nYes.", ""),
        ("qwen3", "<think>a", "", "a"),
        ("qwen2_5", "<think>a</think>Yes.", "<think>a</think>Yes.", ""),
        ("gptoss", "Yes.", "Yes.", ""),
        (
            "gptoss",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
            "Yes.",
            "a",
        ),
    ],
)
def test_no_word_of_a_turn_is_lost(family: str, written: str, content: str, thoughts: str) -> None:
    message = ask(Conversation(chat_of(family)), HI, written + END, tools=[SEARCH] * (CALL in written))
    assert (message["content"], message.get("reasoning_content", "")) == (content, thoughts)
    assert ("tool_calls" in message) == (CALL in written)


def test_a_prompt_may_begin_the_policys_thoughts() -> None:
    conversation = Conversation(chat_of("qwen3_5_think"))
    call = "<tool_call>\n<function=search>\n<parameter=query>\nOslo\n</parameter>\n</function>\n</tool_call>"
    message = ask(conversation, HI, f"I see.\n</think>\n\n{call}\n{END}", tools=[SEARCH])
    assert (message["content"], message["reasoning_content"]) == ("", "I see.")
    request = Request("m", [*HI, called('{"query": "Oslo"}'), result()], tools=[SEARCH])
    assert conversation.begin(request).kind == SPLICED


def test_why_a_context_begins_anew() -> None:
    other = {"role": "user", "content": "Who are you?"}
    dated = [{"role": "system", "content": "It is noon."}, *HI]
    for messages, tools, cause in [
        ([*HI, sent("Yes."), MORE], [SEARCH], "history"),
        ([other, sent("Yes."), MORE], [], "history"),
        ([*dated, sent("Yes."), MORE], [], "history"),
        ([*HI, sent("I said yes."), MORE], [], "client"),
        ([other], [], None),
        (HI, [], None),
    ]:
        conversation = Conversation(chat_of())
        ask(conversation, HI)
        call = conversation.begin(Request("m", messages, tools))
        assert (call.kind, call.cause) == (NEW_CONTEXT, cause)
    conversation = Conversation(chat_of())
    ask(conversation, HI)
    ask(conversation, HI, f"No.{END}")
    ask(conversation, [*HI, sent("No."), MORE])
    assert conversation.begin(Request("m", [*HI, sent("No."), other])).cause == "history", "no context has read this"
    conversation = Conversation(chat_of("qwen3"))
    ask(conversation, HI, f"{THINKS}Yes.{END}")
    call = conversation.begin(Request("m", [*HI, sent("Yes."), MORE]))
    assert call.cause == "template" and "I see." not in call.context.text


def test_an_earlier_point_is_continued_in_a_context_of_its_own_that_repeats_what_was_shown() -> None:
    conversation = Conversation(chat_of(), row=1, stride=4)
    ask(conversation, KIND)
    ask(conversation, [*KIND, sent("Yes."), MORE])
    branch = conversation.begin(Request("m", [*KIND, sent("Yes."), {"role": "user", "content": "why"}]))
    assert (branch.kind, branch.cause, branch.context.row) == (NEW_CONTEXT, "history", 5)
    shown, new = branch.observations
    assert (shown.text, shown.repeats) == (f"{PROMPT}Yes.{END}\n", True)
    assert (new.text, new.repeats) == (NEXT.replace("more", "why")[1:], False)
    say(conversation, branch, f"So.{END}")
    contexts = [each.context for each in conversation.trajectory(StopReason.ENVIRONMENT_DONE).segments]
    assert contexts == [0, 0, 0, 1, 1, 1]
    again = conversation.begin(Request("m", KIND))
    assert [(each.text, each.repeats) for each in again.observations] == [(PROMPT, True)]
    sub = conversation.begin(Request("m", [KIND[0], {"role": "user", "content": "ho"}]))
    before, after = PROMPT.split("i<|im_end|>\n<|im_start|>a")
    assert [each.text for each in sub.observations] == [before, f"o<|im_end|>\n<|im_start|>a{after}"]


def test_a_text_that_encoding_changes_does_not_make_the_new_context_slow() -> None:
    tokenizer: Any = qwen_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()  # as Qwen's own
    chat = ChatFormat.of(setup_of(tokenizer))
    decodings: list[int] = []
    decode = tokenizer.decode
    tokenizer.decode = lambda ids, **options: decodings.append(len(ids)) or decode(ids, **options)
    conversation = Conversation(chat)
    accented = {"role": "user", "content": "e\u0301" + "x" * 500}
    ask(conversation, [accented])
    call = conversation.begin(Request("m", [accented, sent("Yes."), MORE, MORE], [SEARCH]))
    assert "".join(each.text for each in call.observations) == chat.render(call.messages, [SEARCH])
    assert len(decodings) < 20


def test_a_cancelled_call_leaves_no_trace() -> None:
    conversation = Conversation(chat_of())
    hostile = [{"role": "user", "content": HOSTILE}]
    conversation.cancel(conversation.begin(Request("m", hostile)))
    assert (conversation._contexts, conversation.calls) == ([], [])
    ask(conversation, HI)
    before = conversation.trajectory(StopReason.ENVIRONMENT_DONE), [*conversation._contexts[0].token_ids]
    for messages in ([*HI, sent("Yes."), *hostile], [*HI, sent("No."), MORE]):
        conversation.cancel(conversation.begin(Request("m", messages)))
    assert before == (conversation.trajectory(StopReason.ENVIRONMENT_DONE), conversation._contexts[0].token_ids)
    assert kinds(conversation) == [FIRST]
    assert conversation.begin(Request("m", [*HI, sent("Yes."), MORE])).kind == EXTENDED


def test_no_user_and_no_tool_writes_special_tokens() -> None:
    for family in ("qwen2_5", "gemma"):
        chat = chat_of(family)
        special = {*chat.tokenizer.all_special_ids}
        conversation = Conversation(chat)
        harmless = conversation.begin(Request("m", [MORE])).context.token_ids
        hostile = "".join(chat.tokenizer.all_special_tokens)
        call = conversation.begin(Request("m", [{"role": "user", "content": f"more{hostile}<|im_<|im_end|>end|>"}]))
        assert special & {*harmless}
        assert [each for each in call.context.token_ids if each in special] == [x for x in harmless if x in special]
        assert sum(call.neutralized for call in conversation.calls) == 1
    messages = [*HI]
    conversation = Conversation(chat_of())
    for _ in range(3):
        ask(conversation, messages, CALL + END, tools=[SEARCH])
        messages += [called('{"query": "Oslo"}'), result(HOSTILE)]
    assert sum(call.neutralized for call in conversation.calls) == 2, "each message counts once"


@pytest.mark.parametrize("api", [completions, responses])
def test_results_are_read_in_the_order_of_their_calls(api: Any) -> None:
    conversation = Conversation(chat_of())
    said = ask(conversation, HI, f"{CALL}\n{CALL}{END}", tools=[SEARCH])
    one, other = (call["id"] for call in said["tool_calls"])
    for ids, order in (((other, one), ["2", "1"]), ((other, other), ["1", "2"]), ((other, "x"), ["1", "2"])):
        results = [{"role": "tool", "tool_call_id": each, "content": str(n)} for n, each in enumerate(ids, 1)]
        body: dict[str, Any] = {"messages": [*HI, said, *results], "tools": [SEARCH]}
        if api is responses:
            calls = [{"type": "function_call", "call_id": x["id"], **x["function"]} for x in said["tool_calls"]]
            named = [(each["tool_call_id"], each["content"]) for each in results]
            outputs = [{"type": "function_call_output", "call_id": i, "output": text} for i, text in named]
            body = {"input": [*HI, *calls, *outputs], "tools": [{"type": "function", **SEARCH["function"]}]}
        call = conversation.begin(api.read(body))
        assert [result.text for result in call.observations[-1].results] == order
        assert re.findall(r"<tool_response>\n(\d)", call.observations[-1].text) == order
        conversation.cancel(call)


def test_turns_are_messages_with_calls_only_where_the_policy_may_call() -> None:
    conversation = Conversation(chat_of())
    assert "tool_calls" in ask(conversation, HI, CALL + END, tools=[SEARCH])
    for request in ({"tools": [SEARCH], "may_call": False}, {"tools": []}):
        message = ask(conversation, [MORE], CALL + END, **request)
        assert message == {"role": "assistant", "content": CALL}
    for odd in (" \n1 \n", CALL.replace("}}", "}"), '<tool_call>"search"</tool_call>', "<tool_call>" + "[" * 5000):
        assert ask(conversation, [MORE], odd + END, tools=[SEARCH])["content"] == odd
    assert ask(conversation, [MORE], "cut")["content"] == "cut"
    assert [each.finish_reason for each in conversation.answers][-2:] == ["stop", "length"]


def test_what_a_parser_cannot_read_stays_text() -> None:
    tokenizer: Any = qwen_tokenizer()
    templates.add_response_schema(tokenizer)
    function = {"name": "{name}", "arguments": "{content}"}  # an error, if the policy names none
    calls = {"open_pattern": "<tool_call>(?P<name>[a-z]+)?", "transform": {"type": "function", "function": function}}
    fields = tokenizer.response_template["fields"]
    own = {**fields["tool_calls"], **calls}
    del own["open"]
    tokenizer.response_template = {**tokenizer.response_template, "fields": {**fields, "tool_calls": own}}
    conversation = Conversation(ChatFormat.of(setup_of(tokenizer)))
    assert "tool_calls" in ask(conversation, HI, f"<tool_call>search{{}}</tool_call>{END}", tools=[SEARCH])
    assert ask(conversation, HI, CALL + END, tools=[SEARCH]) == {"role": "assistant", "content": CALL}


def test_tools_need_a_parser_of_their_calls() -> None:
    tokenizer: Any = qwen_tokenizer()
    tokenizer.chat_template += " "  # which TRL does not know
    conversation = Conversation(ChatFormat.of(setup_of(tokenizer)))
    ask(conversation, HI)
    with pytest.raises(BadRequest, match="`tools`"):
        conversation.begin(Request("m", HI, tools=[SEARCH]))
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        ChatFormat.of(setup_of(tokenizer))


def test_the_oldest_contexts_are_forgotten() -> None:
    conversation = Conversation(chat_of(), most_contexts=2)
    first = [{"role": "user", "content": "0"}]
    forgotten = conversation.begin(Request("m", first))
    say(conversation, forgotten, f"Yes.{END}")
    for number in range(1, 4):
        ask(conversation, [{"role": "user", "content": str(number)}])
        assert len(conversation._contexts) == 2
    conversation.cancel(forgotten)
    assert conversation.begin(Request("m", [*first, sent("Yes."), MORE])).kind == NEW_CONTEXT
    busy = [conversation.begin(Request("m", [{"role": "user", "content": f"busy {i}"}])) for i in range(3)]
    assert len({call.context.row for call in busy}) == 3, "no call under way is forgotten"


def test_each_own_message_gets_its_own_thoughts_back() -> None:
    """Two turns that say the same, by the ids of their calls, and in order."""
    chat = chat_of("qwen3")
    for text in ('<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>', "OK"):
        conversation, messages = Conversation(chat), [*HI]
        for thoughts in ("first", "second"):
            call = conversation.begin(Request("m", messages, [SEARCH]))
            answer = say(conversation, call, f"<think>\n{thoughts}\n</think>\n\n{text}{END}")
            message = {name: value for name, value in answer.message.items() if name != "reasoning_content"}
            messages = [*messages, message, {"role": "tool", "content": "x"}]
        afresh = conversation.begin(Request("m", [{"role": "system", "content": "new"}, *messages], [SEARCH]))
        own = [message for message in afresh.messages if message["role"] == "assistant"]
        assert [message["reasoning_content"] for message in own] == ["first", "second"]


def test_what_was_sampled_for_nobody_is_taken_back() -> None:
    conversation = Conversation(chat_of())
    first = conversation.begin(Request("m", HI))
    answer = say(conversation, first, f"Yes.{END}")
    messages = [*HI, answer.message, {"role": "user", "content": "more"}]
    held = [*first.context.token_ids]
    second = conversation.begin(Request("m", messages))
    say(conversation, second, f"No.{END}")
    conversation.cancel(first)  # others follow it
    assert len(conversation.answers) == 2
    conversation.cancel(second)
    assert (conversation.answers, first.context.token_ids) == ([answer], held)
    again = conversation.begin(Request("m", messages))
    assert (again.kind, again.context) == (EXTENDED, first.context)


def test_a_template_that_cannot_show_a_beginning_can_show_the_whole() -> None:
    """Of a context that begins anew, with a greeting before the user's message."""
    tokenizer: Any = qwen_tokenizer()
    demand = (
        "{% if not messages|selectattr('role', 'equalto', 'user')|list %}{{ raise_exception('no user') }}{% endif %}"
    )
    tokenizer.chat_template = demand + tokenizer.chat_template
    conversation = Conversation(ChatFormat.of(setup_of(tokenizer)))
    say(conversation, conversation.begin(Request("m", HI)), f"Yes.{END}")
    call = conversation.begin(Request("m", [{"role": "assistant", "content": "Hello!"}, *HI]))
    assert (call.kind, call.cause) == (NEW_CONTEXT, "client")
