"""Calls of tools: their arguments, errors and order, in a tag or in a message."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Optional

import pytest
import requests
from transformers.utils import DocstringParsingException
from trl.chat_template_utils import add_response_schema

from sorl_trl import AgentRollout, search_tool
from sorl_trl.agents.chat import messages_of
from sorl_trl.command_line import UserMistake
from sorl_trl.rollout import (
    ChatProtocol,
    Collector,
    Generation,
    Reply,
    RetryPolicy,
    RolloutLimits,
    RowTurn,
    SearchResponder,
    TagProtocol,
    ToolBox,
    rollout_statistics,
)
from sorl_trl.rollout.environments.tools import ToolError, read_arguments
from sorl_trl.search import NoSearch, SearchUnavailable
from sorl_trl.types import Action, ActionKind, StopReason, ToolCall, Trajectory, Turn
from tests.tools import qwen_tokenizer, tool_call
from tests.unit.rollout.fakes import PARIS, FakeSearch, ScriptedGenerator, bpe_tokenizer, encode

TERSE = TagProtocol(passage_template="{text}")
CHAT: Any = add_response_schema(qwen_tokenizer())
LIMITS = RolloutLimits(max_turns=4, max_turn_tokens=1000, max_observation_tokens=1000)
NO_WAIT = RetryPolicy(attempts=1)
LONG = 60.0


class Game:
    """As it is written for TRL."""

    def reset(self, number: int = 7, **kwargs: Any) -> str:
        self.number, self.guesses = number, 0
        return f"\nGuess {number - 1} or {number}."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: The number that you guess.

        Returns:
            Whether it is right.
        """
        self.guesses += 1
        if self.guesses > 2:
            raise ValueError("The game is over.")
        return "Right!" if number == self.number else "Wrong."

    async def search(self, query: str, k: int = 1) -> str:
        """
        Look something up.

        Args:
            query: What.
            k: How many.
        """
        await asyncio.sleep(0)
        if query == "down":
            raise SearchUnavailable("refused")
        if query == "bug":
            raise KeyError("bug")
        return f"{query} {k}"

    def nothing(self) -> None:
        """Do nothing."""

    def get_reward(self) -> float:
        return float(self.guesses)

    def _hidden(self) -> str:
        return "hidden"


def call(games: ToolBox, *calls: tuple[str, str]) -> list[Reply]:
    """What the first row's game says to one call after the other."""
    kinds = {"search": ActionKind.SEARCH}
    actions = [
        Action(kinds.get(name, ActionKind.TOOL), content, "" if name in kinds else name) for name, content in calls
    ]
    return [games.ask([RowTurn(0, Turn((1,), "", action))])[0].result(60) for action in actions]


def test_public_methods_are_tools() -> None:
    games = ToolBox(environment_factory=Game)
    assert games.protocol.tools == ("guess", "nothing", "search")
    assert games.instructions.splitlines() == [
        '<guess> {"number": "integer: The number that you guess."} </guess> Guess the number.',
        "<nothing> {} </nothing> Do nothing.",
        '<search> {"query": "string: What.", "k": "integer: How many."} </search> Look something up.',
    ]


def test_calls_of_methods_are_answered(caplog: Any) -> None:
    games = ToolBox(environment_factory=Game)
    examples = [{"number": 3, "prompt": "?"}, {"prompt": "?"}]
    assert games.greet(examples) == ["\nGuess 2 or 3.", "\nGuess 6 or 7."]
    games.open(examples)
    calls = [("guess", "2"), ("guess", '{"number": 3}'), ("search", '{"query": "x", "k": 2}'), ("nothing", "{}")]
    assert [reply.text for reply in call(games, *calls)] == ["Wrong.", "Right!", "x 2", "None"]
    with caplog.at_level(logging.WARNING):
        over, bug = call(games, ("guess", "3"), ("search", '{"query": "bug"}'))
    assert (over, bug) == (Reply("error: The game is over."), Reply("error: 'bug'"))
    assert "Game.search raised KeyError('bug'), which is told to the policy" in caplog.text
    (down,) = call(games, ("search", '{"query": "down"}'))
    assert down == Reply(stop=StopReason.ENVIRONMENT_UNAVAILABLE)
    assert [type(game) for game in games.environments] == [Game, Game], "the user's own"
    games.close()
    assert games.environments[0].guesses == 3


def exits() -> str:
    raise SystemExit


async def is_cancelled() -> str:
    raise asyncio.CancelledError


class Speechless(Exception):
    def __str__(self) -> str:
        raise IndexError


def raises_speechless() -> str:
    raise Speechless


def returns_speechless() -> Any:
    return Speechless()


def takes_what_is_not_there(text: str, of: Missing = None) -> str:  # type: ignore[name-defined]  # noqa: F821
    return text


def test_a_run_survives_whatever_a_tool_does() -> None:
    tools = ToolBox([exits, is_cancelled, raises_speechless, returns_speechless, takes_what_is_not_there])
    tools.open([{"prompt": "?"}])
    calls = [(name, "{}") for name in ("exits", "is_cancelled", "raises_speechless", "returns_speechless")]
    assert [reply.text for reply in call(tools, *calls)] == ["error: ", "error: ", "error: Speechless", "error: "]
    assert call(tools, ("takes_what_is_not_there", '{"text": "7"}')) == [Reply("7")]
    tools.close()


def by_urllib() -> str:
    return str(urllib.request.urlopen("http://127.0.0.1:9"))


def by_requests() -> str:
    return str(requests.get("http://127.0.0.1:9"))


def by_requests_inside() -> str:
    try:
        return by_requests()
    except requests.RequestException as error:
        raise KeyError("a bug where it is told") from error


def test_a_service_that_its_client_cannot_reach_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    tools = ToolBox([by_urllib, by_requests, by_requests_inside])
    tools.open([{"prompt": "?"}])
    replies = call(tools, ("by_urllib", "{}"), ("by_requests", "{}"), ("by_requests_inside", "{}"))
    assert [reply.stop for reply in replies] == [*[StopReason.ENVIRONMENT_UNAVAILABLE] * 2, None]
    tools.close()


def with_alarm() -> str:
    signal.signal(signal.SIGALRM, lambda number, frame: None)
    return "never"


async def async_with_alarm() -> str:
    return with_alarm()


def wrong_value() -> str:
    return str(int("seven"))


@pytest.mark.parametrize("tool", [with_alarm, async_with_alarm])
def test_a_tool_that_handles_signals_ends_the_run(tool: Any) -> None:
    tools = ToolBox([tool, wrong_value], concurrency=1)
    tools.open([{"prompt": "?"}])
    assert call(tools, ("wrong_value", "{}"))[0].text.startswith("error: invalid literal")
    with pytest.raises(UserMistake, match=f"^{tool.__name__} .*signal.*`timeout_s`"):
        call(tools, (tool.__name__, "{}"))
    tools.close()


# -------------------------------------------------------------------------------------------------------------------
# Arguments in a tag
# -------------------------------------------------------------------------------------------------------------------


def typed(number: int, share: float = 0.5, is_it: bool = False, name: str | None = None, of: Any = None) -> None: ...


def one(value: Any) -> None: ...


def taking(kind: Any) -> Callable[..., None]:
    def method(value: Any) -> None: ...

    method.__annotations__["value"] = kind
    return method


def no_arguments() -> None: ...


@pytest.mark.parametrize(
    ("method", "content", "arguments"),
    [
        (typed, '{"number": 1}', {"number": 1}),
        (typed, '{"number": "1", "share": 1, "is_it": "True"}', {"number": 1, "share": 1.0, "is_it": True}),
        (typed, '{"number": 2, "name": null, "of": [1]}', {"number": 2, "name": None, "of": [1]}),
        (taking(int), " 7 ", {"value": 7}),
        (taking(float), "1e3", {"value": 1000.0}),
        (taking(bool), "false", {"value": False}),
        (taking(str), "7", {"value": "7"}),
        (taking(int | None), "7", {"value": 7}),
        (taking(Optional[int]), '{"value": null}', {"value": None}),  # noqa: UP045
        (taking(str), '{"value": "7"}', {"value": "7"}),
        (taking(str), '{"other": "7"}', {"value": '{"other": "7"}'}),
        (taking(list[int]), "[1]", {"value": [1]}),
        (taking(dict), '{"k": 1}', {"value": {"k": 1}}),
        (taking(list), "plain", {"value": "plain"}),
        (one, "plain", {"value": "plain"}),
        (no_arguments, "{}", {}),
    ],
)
def test_arguments_that_fit(method: Any, content: str, arguments: dict[str, Any]) -> None:
    read = read_arguments(method, content)
    assert read == arguments
    assert [type(value) for value in read.values()] == [type(value) for value in arguments.values()]


@pytest.mark.parametrize(
    ("method", "content", "why"),
    [
        (typed, "[7]", 'typed takes a JSON object with "number", "share"'),
        (typed, "{", "typed takes a JSON object"),
        (typed, "[" * 100_000, "typed takes a JSON object"),
        (typed, "{}", "typed: missing a required argument: 'number'; it takes \"number\""),
        (typed, '{"number": 1, "other": 2}', "typed: got an unexpected keyword argument 'other'"),
        (typed, '{"number": "seven"}', 'typed: number must be int, not "seven"'),
        (typed, '{"number": 1.5}', "typed: number must be int, not 1.5"),
        (typed, '{"number": true}', "typed: number must be int, not true"),
        (typed, '{"number": Infinity}', "typed: number must be int, not Infinity"),
        (typed, '{"number": 1, "is_it": 1}', "typed: is_it must be bool, not 1"),
        (taking(str), '{"value": 7}', "method: value must be str, not 7"),
        (taking(int | None), '{"value": "x"}', 'method: value must be int, not "x"'),
        (taking(int), "9" * 5000, "method: value must be int, not "),
        (no_arguments, "x", "no_arguments takes a JSON object with no arguments: {}"),
    ],
)
def test_arguments_that_do_not_fit_are_told_to_the_policy(method: Any, content: str, why: str) -> None:
    with pytest.raises(ToolError) as refused:
        read_arguments(method, content)
    assert why in str(refused.value) and len(str(refused.value)) < 300


# -------------------------------------------------------------------------------------------------------------------
# Calls in a message, and tags of several tools
# -------------------------------------------------------------------------------------------------------------------


def sampled(text: str) -> Generation:
    return Generation(encode(bpe_tokenizer(), text), None, True)


def collect(box: ToolBox, *rows: list[str]) -> list[Trajectory]:
    scripts = {row: [sampled(text) for text in texts] for row, texts in enumerate(rows)}
    collector = Collector(bpe_tokenizer(), box, box.protocol, LIMITS)
    return collector.collect([(row,) for row in range(len(rows))], ScriptedGenerator(scripts))


def results_of(trajectory: Trajectory) -> list[str]:
    frame = TERSE.information_frame
    return [seen.text.removeprefix(frame.prefix).removesuffix(frame.suffix) for seen in trajectory.observations]


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


async def echo(text: str) -> str:
    return text


def halve(number: float) -> str:
    """
    Halve a number.

    Args:
        number: It.
    """
    return f"{number / 2:g}"


def test_one_trajectory_uses_functions_an_object_of_its_own_and_the_search_engine() -> None:
    search = FakeSearch()
    box = ToolBox([halve, echo], Counter, search, TERSE)
    assert box.protocol.tools == ("search", "halve", "echo", "add")
    turns = [
        "<add>2</add>",
        '<add>{"number": 3}</add>',
        "<halve>1000</halve>",
        "<search>France</search>",
        "<answer>500</answer>",
    ]
    first, other = collect(box, turns, ["<add>1</add>", "<echo>hello</echo>", turns[3], turns[4]])
    assert results_of(first) == ["2", "5", "500", PARIS.text]
    assert results_of(other) == ["1", "hello", PARIS.text]
    assert first.observations[3].passages == (PARIS,)
    assert [turn.action.tool for turn in first.turns] == ["add", "add", "halve", "", ""]
    assert (first.stop_reason, first.answer) == (StopReason.ANSWERED, "500")
    assert [counter.count for counter in box.environments] == [5, 1]
    assert rollout_statistics([first, other])["searches_per_trajectory"] == 1.0


def test_tools_that_are_down_mask_their_own_rows_alone() -> None:
    engine = SearchResponder(FakeSearch([SearchUnavailable("down")]), TERSE, retry=NO_WAIT)
    down, fine = collect(ToolBox([halve], search=engine), ["<search>a</search>"], ["<answer>1</answer>"])
    assert (down.stop_reason, fine.stop_reason) == (StopReason.SEARCH_UNAVAILABLE, StopReason.ANSWERED)

    def refused(text: str) -> str:
        raise ConnectionError(text)

    tools = [refused, search_tool(FakeSearch([SearchUnavailable("down")]), retry=NO_WAIT)]
    trajectories = collect(ToolBox(tools), ["<refused>a</refused>"], ["<search>a</search>"], ["<answer>1</answer>"])
    reasons = [trajectory.stop_reason for trajectory in trajectories]
    assert reasons == [StopReason.ENVIRONMENT_UNAVAILABLE, StopReason.ENVIRONMENT_UNAVAILABLE, StopReason.ANSWERED]


def test_a_tool_that_hangs_masks_its_row_and_one_that_raises_is_told() -> None:
    go = threading.Event()

    def wait(text: str) -> str:
        go.wait(LONG)
        return text

    def fail(text: str) -> str:
        raise KeyError(text)

    box = ToolBox([wait, fail], timeout_s=0.5, concurrency=2)
    hung, told = collect(box, ["<wait>a</wait>"], ["<fail>b</fail>", "<answer>1</answer>"])
    go.set()
    assert hung.stop_reason is StopReason.ENVIRONMENT_UNAVAILABLE
    assert (told.stop_reason, results_of(told)) == (StopReason.ANSWERED, ["error: 'b'"])


def test_tools_that_the_box_lacks_are_no_actions() -> None:
    (only,) = collect(ToolBox([halve]), ["<query>SELECT 1</query> <search>a</search>", "<answer>x</answer>"])
    assert [turn.action.kind for turn in only.turns] == [ActionKind.INVALID, ActionKind.ANSWER]


class Guessing(Counter):
    """Another kind of environment."""

    def reset(self, number: int, **others: Any) -> str:  # type: ignore[override]
        assert "environment" not in others, "which TRL keeps to itself"
        self.count = number
        return f"from {number}"

    def guess(self, number: int) -> str:
        return str(number == self.count)


def test_rows_may_have_environments_of_several_kinds() -> None:
    box = ToolBox([halve], {"counting": Counter, "guessing": Guessing}, NoSearch(), TERSE)
    assert box.protocol.tools == ("search", "halve", "add", "guess")
    examples: list[dict[str, Any]] = [{"environment": "counting"}, {"environment": "guessing", "number": 3}]
    assert box.greet(examples) == [None, "from 3"]
    box.open(examples)
    asked = [RowTurn(row, Turn((1,), "", Action(ActionKind.TOOL, "3", "guess"))) for row in (0, 1)]
    replies = [future.result(LONG).text for future in box.ask(asked)]
    assert replies == ["error: Tool guess not found.", "True"]
    assert [type(each) for each in box.environments] == [Counter, Guessing]
    box.close()
    with pytest.raises(ValueError, match=r"environment='maze', but there are \['counting', 'guessing'\]"):
        box.open([{"environment": "maze"}])


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


def broken() -> str:
    """Fail."""
    raise ConnectionError("no route")


def converse(*messages: str) -> tuple[Trajectory, ToolBox, list[tuple[int, ...]]]:
    box = ToolBox([halve, broken], Notebook, protocol=ChatProtocol())
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


def test_no_call_is_made_after_one_of_a_tool_that_is_down() -> None:
    calls = [tool_call("write", line="c"), tool_call("broken"), tool_call("write", line="d")]
    trajectory, box, _ = converse("".join(calls))
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_UNAVAILABLE
    assert box.environments[0].lines == ["c"]


def test_no_call_is_made_after_one_that_took_too_long() -> None:
    go, made = threading.Event(), []

    def hang() -> None:
        """Hang."""
        go.wait(LONG)

    def note() -> None:
        """Note."""
        made.append(threading.current_thread())

    before = {*threading.enumerate()}
    box = ToolBox([hang, note], protocol=ChatProtocol(), timeout_s=0.3)
    box.open([{}])
    threads = {*threading.enumerate()} - before
    calls = (ToolCall("note", {}), ToolCall("hang", {}), ToolCall("note", {}))
    (reply,) = box.ask([RowTurn(0, Turn((1,), "", Action(ActionKind.MESSAGE, calls=calls)))])
    assert reply.result(LONG) == Reply(stop=StopReason.ENVIRONMENT_UNAVAILABLE)
    go.set()
    box.close()
    for thread in threads:
        thread.join(LONG)
    assert len(made) == 1


@pytest.mark.parametrize(
    "message",
    ["f(x) grows.", f"<think>no {tool_call('add', number=1)} yet</think>add(number=1) would do.", "<tool_call>{"],
)
def test_what_is_no_call_ends_the_trajectory(message: str) -> None:
    trajectory, box, contexts = converse(message)
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_DONE
    assert (box.environments[0].count, len(contexts)) == (0, 1)


@pytest.mark.parametrize(
    "content", ['{"name": "add", "arguments": ' + "[" * 5000 + "}", '"add"', "null", "5", "[1]", '{"name": 5}']
)
def test_what_is_no_call_is_text(content: str) -> None:
    """Brackets without an end no JSON parser takes, and a policy that repeats itself writes them."""
    text = f"<tool_call>\n{content}\n</tool_call>"
    protocol = ChatProtocol(functions=({},)).in_chat(CHAT)
    assert protocol.parse(f"{text}<|im_end|>").calls == ()
    turn = Turn(encode(CHAT, f"{text}<|im_end|>"), text, Action(ActionKind.MESSAGE, text))
    trajectory = Trajectory((1,), (turn,), StopReason.ENVIRONMENT_DONE)
    assert messages_of(trajectory, CHAT, ()) == [{"role": "assistant", "content": text}]


def test_what_is_wrong_with_a_call_is_told_and_what_is_wrong_with_a_tool_logged(caplog: Any) -> None:
    wrong = [tool_call("subtract", number=1), tool_call("add", amount=1), tool_call("halve", number=[1])]
    trajectory, *_ = converse("".join(wrong), "I give up.")
    assert trajectory.stop_reason is StopReason.ENVIRONMENT_DONE
    assert [each.text for each in trajectory.observations[0].results] == [
        "{'error': 'Tool subtract not found.'}",
        "{'error': \"Counter.add() got an unexpected keyword argument 'amount'\"}",
        "{'error': \"unsupported operand type(s) for /: 'list' and 'int'\"}",
    ]
    logged = [each.getMessage() for each in caplog.records if "told to the policy" in each.getMessage()]
    assert len(logged) == 1 and logged[0].startswith("halve raised TypeError")


# -------------------------------------------------------------------------------------------------------------------
# Rewards, and what is refused
# -------------------------------------------------------------------------------------------------------------------


class Judged(Counter):
    """Its reward is what it was made with."""

    __slots__ = ("given",)

    def __init__(self, given: Any = 0.5) -> None:
        self.given = given

    async def get_reward(self) -> Any:
        return self.given


def test_their_own_reward_is_a_reward_function() -> None:
    box = ToolBox(environment_factory={"game": Game, "judged": Judged, "none": Counter})
    objects = [Game(), Judged(), Game(), Judged(None), Judged([0.5, None]), Counter()]
    for each in objects:
        each.reset()
    reasons = [StopReason.ANSWERED] * 6
    reasons[2] = StopReason.ENVIRONMENT_UNAVAILABLE
    trajectories = [Trajectory((1,), (), reason) for reason in reasons]
    rewards = {
        function.__name__: asyncio.run(function(environments=objects, trajectory=trajectories, prompts=[]))
        for function in box.rewards
    }
    assert rewards == {"Game": [0.0, *[None] * 5], "Judged": [None, 0.5, None, None, [0.5, None], None]}


class Toolless:
    def reset(self) -> None: ...


class Answering(Toolless):
    def answer(self, text: str) -> str:
        return text


def by_place(text: str, /) -> str:
    return text


def by_pieces(text: str) -> Iterator[str]:
    yield text


def all_of(*texts: str) -> str:
    return "".join(texts)


@pytest.mark.parametrize(
    ("tool", "problem"),
    [
        (by_place, "by_place takes `text: .*` by its place"),
        (all_of, r"all_of takes `\*texts: .*` by its place"),
        (by_pieces, "by_pieces is a generator"),
        (partial(all_of), "must be a function or a method, which has a name"),
    ],
)
def test_functions_that_no_policy_could_call_are_named(tool: Any, problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        ToolBox([tool])


@pytest.mark.parametrize(
    ("factory", "problem"),
    [
        (object, "made a object: TRL's environments have a method `reset`"),
        (Toolless, "name no tool"),
        (Answering, "a tool's tag is a name, and none of .*'answer'"),
    ],
)
def test_objects_that_cannot_be_used_are_named(factory: Any, problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        ToolBox(environment_factory=factory)


def test_what_cannot_be_a_tool_is_named() -> None:
    with pytest.raises(TypeError, match="search is a str, but must have a method `search_batch`"):
        ToolBox(search="index")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="name no tool"):
        ToolBox()
    with pytest.raises(ValueError, match=r"\['echo', 'echo'\]: each must have a name of its own"):
        ToolBox([echo, echo])
    with pytest.raises(ValueError, match=r"\['search'\], but 'search' is the search engine's"):
        ToolBox([search_tool(NoSearch())], search=NoSearch())
    assert ToolBox(search=NoSearch()).environments == ()


def test_a_tool_box_in_messages_takes_its_protocol_and_no_tag_for_searches() -> None:
    with pytest.raises(ValueError, match="protocol"):
        AgentRollout(ToolBox([halve], protocol=ChatProtocol()), ChatProtocol())
    with pytest.raises(DocstringParsingException):
        ToolBox([lambda number: number], protocol=ChatProtocol())
    with pytest.raises(ValueError, match=r"search_tool\(engine\)"):
        ToolBox(search=NoSearch(), protocol=ChatProtocol())
    (tool,) = ToolBox([search_tool(NoSearch())], protocol=ChatProtocol()).shown[None]
    assert tool.__name__ == "search"
