from __future__ import annotations

import threading
from typing import Any

import pytest

from sorl_trl import search_tool
from sorl_trl.rollout import (
    Collector,
    Generation,
    RetryPolicy,
    RolloutLimits,
    RowTurn,
    SearchResponder,
    TagProtocol,
    ToolBox,
    rollout_statistics,
)
from sorl_trl.search import NoSearch, SearchUnavailable
from sorl_trl.types import Action, ActionKind, StopReason, Trajectory, Turn
from tests.unit.rollout.fakes import PARIS, FakeSearch, ScriptedGenerator, bpe_tokenizer, encode

TERSE = TagProtocol(passage_template="{text}")
LIMITS = RolloutLimits(max_turns=4, max_turn_tokens=400, max_observation_tokens=400)
NO_WAIT = RetryPolicy(attempts=1)
LONG = 60.0


def said(text: str) -> Generation:
    return Generation(encode(bpe_tokenizer(), text), None, True)


def collect(box: ToolBox, *rows: list[str]) -> list[Trajectory]:
    scripts = {row: [said(text) for text in texts] for row, texts in enumerate(rows)}
    collector = Collector(bpe_tokenizer(), box, box.protocol, LIMITS)
    return collector.collect([(row,) for row in range(len(rows))], ScriptedGenerator(scripts))


def heard(trajectory: Trajectory) -> list[str]:
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
    assert heard(first) == ["2", "5", "500", PARIS.text]
    assert heard(other) == ["1", "hello", PARIS.text]
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
    assert (told.stop_reason, heard(told)) == (StopReason.ANSWERED, ["error: 'b'"])


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
    assert replies == ["error: there is no guess here, only halve, add", "True"]
    assert [type(each) for each in box.environments] == [Counter, Guessing]
    box.close()
    with pytest.raises(ValueError, match=r"environment='maze', but there are \['counting', 'guessing'\]"):
        box.open([{"environment": "maze"}])


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
