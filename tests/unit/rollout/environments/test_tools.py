from __future__ import annotations

import asyncio
import http.client
import logging
import ssl
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Optional

import httpx2
import pytest
import requests

from sorl_trl.rollout import Reply, RowTurn, ToolBox
from sorl_trl.rollout.environments.tools import WrongArguments, read_arguments
from sorl_trl.search import SearchUnavailable
from sorl_trl.search.backend import is_down
from sorl_trl.types import Action, ActionKind, StopReason, Trajectory, Turn


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


@pytest.mark.parametrize(
    "error",
    [
        httpx2.RemoteProtocolError("Server disconnected without sending a response."),
        requests.exceptions.ChunkedEncodingError("broken"),
        http.client.IncompleteRead(b"half"),
        ssl.SSLEOFError(),
    ],
)
def test_a_connection_that_is_broken_off_is_down(error: Exception) -> None:
    assert is_down(error)


def test_their_own_reward_is_a_reward_function() -> None:
    class Judged(Game):
        async def get_reward(self) -> float:  # type: ignore[override]
            return 0.5

    class NoReward:
        def reset(self) -> None: ...

        def look(self) -> str:
            return ""

    games = ToolBox(environment_factory={"game": Game, "judged": Judged, "none": NoReward})
    objects = [Game(), Judged(), Game(), NoReward()]
    for game in objects:
        game.reset()
    reasons = [StopReason.ANSWERED, StopReason.MAX_TURNS, StopReason.ENVIRONMENT_UNAVAILABLE, StopReason.ANSWERED]
    trajectories = [Trajectory((1,), (), reason) for reason in reasons]
    rewards = {
        function.__name__: asyncio.run(function(environments=objects, trajectory=trajectories, prompts=[]))
        for function in games.rewards
    }
    assert rewards == {"Game": [0.0, None, None, None], "Judged": [None, 0.5, None, None]}


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
    with pytest.raises(WrongArguments) as refused:
        read_arguments(method, content)
    assert why in str(refused.value) and len(str(refused.value)) < 300


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
