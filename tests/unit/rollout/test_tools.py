"""Calls of tools: their errors and order, and what comes of them; a search engine as a tool."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from transformers.utils import DocstringParsingException, get_json_schema
from trl.chat_template_utils import add_response_schema

from sorl_trl import AgentRollout, answer_in_messages, search_tool
from sorl_trl.rollout import (
    ChatProtocol,
    Collector,
    Generation,
    Reply,
    RetryPolicy,
    RolloutLimits,
    TagProtocol,
    ToolBox,
    rollout_statistics,
)
from sorl_trl.rollout.chat import messages_of
from sorl_trl.search import SearchError, SearchUnavailable
from sorl_trl.types import Action, ActionKind, Passage, StopReason, ToolCall, Trajectory, Turn
from tests.tools import qwen_tokenizer, tool_call
from tests.unit.rollout.fakes import ScriptedGenerator, encode

CHAT: Any = add_response_schema(qwen_tokenizer())
LIMITS = RolloutLimits(max_turns=4, max_turn_tokens=1000, max_observation_tokens=1000)
DOWN = Reply(stop=StopReason.ENVIRONMENT_UNAVAILABLE)
LONG = 60.0


def call(box: ToolBox, *calls: tuple[str, dict[str, Any]], row: int = 0) -> Any:
    """What a row's tools say to the calls of one message: their results, or a reply that ends the trajectory."""
    made = tuple(ToolCall(name, arguments) for name, arguments in calls)
    reply = box.ask({row: Turn((1,), "", Action(ActionKind.MESSAGE, calls=made))})[row].result(LONG)
    return [each.text for each in reply.results] or reply


def exits() -> str:
    """Exit."""
    raise SystemExit


async def exits_later() -> str:
    """Exit."""
    raise SystemExit


async def is_cancelled() -> str:
    """Cancel."""
    raise asyncio.CancelledError


def test_a_run_survives_what_ends_a_program() -> None:
    tools = ToolBox([exits, is_cancelled, exits_later])
    tools.open([{"prompt": "?"}])
    results = call(tools, ("exits", {}), ("is_cancelled", {}), ("exits_later", {}))
    assert all(text.startswith("{'error': ") for text in results) and len(results) == 3
    tools.close()


def sees() -> list[Any]:
    """See."""
    return [{"type": "image", "image": object()}]


class Pictured:
    def reset(self, **_: Any) -> list[Any]:
        return sees()


def test_images_are_refused() -> None:
    tools = ToolBox([sees])
    tools.open([{"prompt": "?"}])
    with pytest.raises(TypeError, match="'sees' returned an image"):
        call(tools, ("sees", {}))
    tools.close()
    with pytest.raises(TypeError, match=r"Pictured\.reset returned a list, but must return text"):
        ToolBox([sees], Pictured).open([{"prompt": "?"}])


class Counter:
    """An environment as it is written for TRL; with slots, so that nothing can be hung onto it."""

    __slots__ = ("count",)

    def reset(self, **_: Any) -> None:
        self.count = 0

    def add(self, number: int) -> str:
        """
        Add to the sum.

        Args:
            number: How much.
        """
        self.count += number
        return str(self.count)


def halve(number: float) -> str:
    """
    Halve a number.

    Args:
        number: It.
    """
    return f"{number / 2:g}"


class Notebook(Counter):
    """Written to by coroutines and read by functions; what it holds may be bound to its thread."""

    __slots__ = ("lines", "thread")

    def reset(self, **_: Any) -> None:
        super().reset()
        self.lines: list[str] = []
        self.thread = threading.current_thread()

    async def write(self, line: str) -> str:
        """
        Write a line.

        Args:
            line: It.
        """
        await asyncio.sleep(0)
        self.lines.append(line)
        return "written"

    def read(self) -> str:
        """Read all lines."""
        assert threading.current_thread() is self.thread
        return ", ".join(self.lines)


class Appending(Notebook):
    """Another kind of environment."""

    def reset(self, number: int, **others: Any) -> str:  # type: ignore[override]
        assert "environment" not in others, "which TRL keeps to itself"
        super().reset()
        self.count = number
        return f"from {number}"

    def add(self, number: str) -> str:  # type: ignore[override]
        """
        Append to a text.

        Args:
            number: What.
        """
        return f"{self.count}{number}"


def test_rows_may_have_environments_of_several_kinds() -> None:
    box = ToolBox([halve], {"counting": Counter, "appending": Appending})
    examples: list[dict[str, Any]] = [{"environment": "counting"}, {"environment": "appending", "number": 3}]
    assert [row.greeting for row in box.open(examples)] == [None, "from 3"]
    assert call(box, ("write", {"line": "a"})) == ["{'error': 'Tool write not found.'}"]
    assert call(box, ("write", {"line": "a"}), row=1) == ["written"]
    assert [type(each) for each in box.environments] == [Counter, Appending]
    protocol = box.protocol.in_chat(CHAT)
    typed = [replace(protocol, functions=row.tools).parse(tool_call("add", number="7")) for row in box.rows]
    assert [each.calls[0].arguments["number"] for each in typed] == [7, "7"], "by each kind's own schema"
    box.close()
    assert box.environments[1].lines == ["a"], "for reward functions"


def broken() -> str:
    """Fail."""
    raise ConnectionError("no route")


async def broken_later() -> str:
    """Fail."""
    raise TimeoutError


def converse(*messages: str) -> tuple[Trajectory, ToolBox, list[tuple[int, ...]]]:
    box = ToolBox([halve, broken, broken_later], Notebook)
    script = [Generation(encode(CHAT, f"{message}<|im_end|>"), None, True) for message in messages]
    engine = ScriptedGenerator({CHAT.encode("Begin.")[0]: script})
    collector = Collector(CHAT, box, box.protocol.in_chat(CHAT), LIMITS)
    (trajectory,) = collector.collect([CHAT.encode("Begin.")], engine)
    return trajectory, box, [context for (context,) in engine.calls]


def test_a_message_calls_tools_in_order() -> None:
    calls = [
        *(tool_call("add", number=2), tool_call("halve", number="4"), tool_call("add", number=3)),
        *(tool_call("write", line="a"), tool_call("read"), tool_call("write", line="b"), tool_call("read")),
    ]
    trajectory, box, contexts = converse("Let me see.\n" + "".join(calls), "It is print(6).")
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_DONE
    results = trajectory.observations[0].results
    assert [each.text for each in results] == ["2", "2", "5", "written", "a", "written", "a, b"]
    assert [each.tool for each in results[:2]] == ["add", "halve"]
    shown = CHAT.decode(contexts[1])
    assert all(f"<tool_response>\n{each.text}\n</tool_response>" in shown for each in results)
    assert box.environments[0].count == 5
    assert rollout_statistics([trajectory])["tool_calls_per_trajectory"] == len(calls)


@pytest.mark.parametrize("tool", ["broken", "broken_later"])
def test_no_call_is_made_after_one_of_a_tool_that_is_down(tool: str) -> None:
    calls = [tool_call("write", line="c"), tool_call(tool), tool_call("write", line="d")]
    trajectory, box, _ = converse("".join(calls))
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_UNAVAILABLE
    assert box.environments[0].lines == ["c"]


@pytest.mark.parametrize(
    "message",
    ["f(x) grows.", f"<think>no {tool_call('add', number=1)} yet</think>add(number=1) would do.", "<tool_call>{"],
)
def test_what_is_no_call_ends_the_trajectory(message: str) -> None:
    trajectory, box, contexts = converse(message)
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_DONE
    assert (box.environments[0].count, len(contexts)) == (0, 1)


@pytest.mark.parametrize(
    "content",
    [
        *(f'{{"name": "add", "arguments": {given}}}' for given in ("[" * 5000, "[" * 300 + "]" * 300)),
        *('"add"', "null", "5", "[1]", '{"name": 5}'),
    ],
)
def test_what_is_no_call_is_text(content: str) -> None:
    """Brackets nest too deeply, or without an end: a policy that repeats itself writes them."""
    text = f"<tool_call>\n{content}\n</tool_call>"
    protocol = ChatProtocol(functions=({},)).in_chat(CHAT)
    assert protocol.parse(f"{text}<|im_end|>").calls == ()
    turn = Turn(encode(CHAT, f"{text}<|im_end|>"), text, Action(ActionKind.MESSAGE, text))
    trajectory = Trajectory((1,), (turn,), StopReason.ENVIRONMENT_DONE)
    assert messages_of(trajectory, CHAT, ()) == [{"role": "assistant", "content": text}]


class Judged(Counter):
    """Its reward is what it was made with."""

    __slots__ = ("given",)

    def __init__(self, given: Any = 0.5) -> None:
        self.given = given

    async def get_reward(self) -> Any:
        return self.given


class Scored(Counter):
    __slots__ = ()

    def get_reward(self) -> float:
        return 0.0


def test_their_own_reward_is_a_reward_function() -> None:
    box = ToolBox(environment_factory={"scored": Scored, "judged": Judged, "none": Counter})
    objects = [Scored(), Judged(), Scored(), Judged(None), Judged([0.5, None]), Counter()]
    reasons = [StopReason.ANSWERED] * 6
    reasons[2] = StopReason.ENVIRONMENT_UNAVAILABLE
    trajectories = [Trajectory((1,), (), reason) for reason in reasons]
    rewards = {
        function.__name__: asyncio.run(function(environments=objects, trajectory=trajectories, prompts=[]))
        for function in box.rewards
    }
    assert rewards == {"Scored": [0.0, *[None] * 5], "Judged": [None, 0.5, None, None, [0.5, None], None]}


class Toolless:
    def reset(self) -> None: ...


@pytest.mark.parametrize(
    ("tools", "factory", "problem"),
    [
        ([], None, "no tool"),
        ([], Toolless, "no tool"),
        ([], object, "a method `reset`"),
        ([halve, halve], None, r"\['halve', 'halve'\]"),
        ([partial(halve, 1)], None, "method with a name"),
    ],
)
def test_what_cannot_be_a_tool_is_named(tools: Any, factory: Any, problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        ToolBox(tools, factory)


def test_tools_have_docstrings_and_bring_their_protocol() -> None:
    with pytest.raises(DocstringParsingException):
        ToolBox([lambda number: number])
    with pytest.raises(ValueError, match="protocol"):
        AgentRollout(ToolBox([halve]), ChatProtocol())
    with pytest.raises(TypeError, match="environment is 3, but must be an environment class"):
        AgentRollout(3)  # type: ignore[arg-type]


class Engine:
    """Finds one passage, refuses an empty query, and is down for "Oslo"."""

    def search_batch(self, queries: Any, k: int) -> list[list[Passage]]:
        if queries == [""]:
            raise SearchError("empty")
        if queries == ["Oslo"]:
            raise SearchUnavailable("down")
        return [[Passage("1", "Bern", f"in Switzerland, k={k}")] if query == "Bern" else [] for query in queries]


def test_a_search_tool_returns_what_was_found() -> None:
    search = search_tool(Engine(), k=2, retry=RetryPolicy(attempts=1))
    assert search("Bern") == "Doc 1(Title: Bern) in Switzerland, k=2"
    assert search("Rome") == TagProtocol().no_results
    assert search("") == TagProtocol().search_failed
    with pytest.raises(SearchUnavailable):
        search("Oslo")
    schema = get_json_schema(search)["function"]
    assert (schema["name"], schema["parameters"]["required"]) == ("search", ["query"])
    with pytest.raises(ValueError, match="`k` is 0"):
        search_tool(Engine(), k=0)


def test_answers_are_those_of_the_assistant() -> None:
    answer = {"role": "assistant", "content": "<answer> Rome <answer>Oslo</answer> or <answer>Lima</answer>"}
    later = {"role": "assistant", "content": "No: <answer>Bern</answer>"}
    call = {"role": "assistant", "content": None, "tool_calls": []}
    result = {"role": "tool", "name": "lookup", "content": "<answer>Lyon</answer>"}
    image = {"role": "tool", "name": "lookup", "content": [{"type": "image", "image": None}]}
    assert answer_in_messages([call, result, answer, result, image, later]) == "Oslo"
    assert answer_in_messages([call, result]) is None
    assert answer_in_messages([{"role": "assistant", "content": "<answer>"}, result]) is None
    assert answer_in_messages([{"role": "assistant", "content": "Lyon</answer> <answer> </answer>"}]) is None
    with pytest.raises(TypeError, match="list of messages"):
        answer_in_messages("<answer>Lyon</answer>")  # type: ignore[arg-type]
