from __future__ import annotations

import asyncio
import errno
import http.client
import logging
import signal
import socket
import ssl
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Optional

import httpx2
import pytest
import requests

from sorl_trl.command_line import UserMistake
from sorl_trl.rollout import Reply, RowTurn, ToolBox
from sorl_trl.rollout.environments.tools import ToolError, read_arguments
from sorl_trl.search import SearchError, SearchUnavailable
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


def of(package: str, *names: str, **attributes: Any) -> Exception:
    """An error as another package defines it: `names` are those of its classes, the most general first."""
    kind: type[Exception] = Exception
    for name in names:
        kind = type(name, (kind,), {"__module__": package})
    error = kind()
    vars(error).update(attributes)
    return error


def caused(*errors: BaseException) -> BaseException:
    """The last of some errors, each raised `from` the one before."""
    for cause, error in pairwise(errors):
        error.__cause__ = cause
    return errors[-1]


def handled(*errors: BaseException) -> BaseException:
    """The last of some errors, each raised while the one before was handled."""
    for handled, error in pairwise(errors):
        error.__context__ = handled
    return errors[-1]


def coded(name: str) -> Callable[[], Any]:
    return lambda: SimpleNamespace(name=name)


@pytest.mark.parametrize(
    "error",
    [
        httpx2.RemoteProtocolError("Server disconnected without sending a response."),
        requests.exceptions.ChunkedEncodingError("broken"),
        http.client.IncompleteRead(b"half"),
        asyncio.IncompleteReadError(b"half", 9),
        ssl.SSLEOFError(),
        OSError(errno.EHOSTUNREACH, "No route to host"),
        of("websockets.exceptions", "ConnectionClosed", "ConnectionClosedError", rcvd=None),
        of("websockets.exceptions", "ConnectionClosed", "ConnectionClosedOK", rcvd=SimpleNamespace(code=1000)),
        caused(EOFError(), of("websockets.exceptions", "InvalidMessage")),
        of("websocket._exceptions", "WebSocketConnectionClosedException"),
        of("websocket._exceptions", "WebSocketTimeoutException"),
        of("grpc._channel", "RpcError", "_InactiveRpcError", code=coded("UNAVAILABLE")),
        of("grpc.aio._call", "RpcError", "AioRpcError", code=coded("DEADLINE_EXCEEDED")),
    ],
)
def test_a_connection_that_is_broken_off_is_down(error: Exception) -> None:
    assert is_down(error)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file"),
        OSError("no such model"),
        EOFError("as `input` raises it"),
        of("websockets.exceptions", "ConnectionClosed", "ConnectionClosedError", rcvd=SimpleNamespace(code=1009)),
        of("websockets.exceptions", "ConnectionClosed", "ConnectionClosedError", rcvd=SimpleNamespace(code=4000)),
        of("grpc._channel", "RpcError", "_InactiveRpcError", code=coded("INVALID_ARGUMENT")),
        of("grpc", "RpcError"),
        of("mine", "WebSocketTimeoutException"),
    ],
)
def test_a_refusal_and_a_mistake_in_the_setup_are_not_down(error: Exception) -> None:
    assert not is_down(error)


def answered(code: int) -> requests.HTTPError:
    response = requests.Response()
    response.status_code = code
    return requests.HTTPError(response=response)


@pytest.mark.parametrize("first", [ConnectionResetError("gone"), TimeoutError("late"), SearchUnavailable("down")])
def test_what_a_lost_connection_caused_is_down_however_deep(first: Exception) -> None:
    of_client = of("openai", "OpenAIError", "APIConnectionError")
    assert is_down(caused(first, of_client))
    assert is_down(caused(first, OSError("inner"), of_client, RuntimeError("no judge")))
    assert is_down(handled(first, of("botocore.exceptions", "EndpointConnectionError")))
    assert is_down(handled(first, ValueError("inner"), RuntimeError("no judge")))
    assert is_down(of("exceptiongroup", "ExceptionGroup", exceptions=(handled(first, ValueError()), first)))


@pytest.mark.parametrize("first", [ConnectionResetError("gone"), TimeoutError("late"), SearchUnavailable("down")])
def test_what_only_happened_beside_a_lost_connection_is_not_down(first: Exception) -> None:
    for mistake in (KeyError("bug"), TypeError("bug"), ZeroDivisionError(), SearchError("refused"), answered(404)):
        assert not is_down(handled(first, mistake))
        assert not is_down(caused(first, mistake, ValueError()))
    assert not is_down(handled(first, KeyboardInterrupt())), "or it would be retried"
    hidden = handled(first, ValueError("is told"))
    hidden.__suppress_context__ = True
    assert not is_down(hidden), "raised `from None`"
    assert not is_down(of("exceptiongroup", "ExceptionGroup", exceptions=(first, KeyError("bug"))))


def test_errors_that_caused_each_other_are_followed_once() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_down(first)


def test_a_host_of_two_addresses_that_both_refuse_is_down() -> None:
    async def connect() -> None:
        loop = asyncio.get_running_loop()
        at = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{last}", 9)) for last in (1, 2)]
        loop.getaddrinfo = lambda *args, **kwargs: asyncio.sleep(0, at)  # type: ignore[assignment]
        await loop.create_connection(asyncio.Protocol, "of-two-addresses", 9)

    with pytest.raises(OSError) as caught:
        asyncio.run(connect())
    assert is_down(caught.value)


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


@pytest.mark.parametrize("given", [None, 2, [0.5, None]])
def test_what_their_reward_returns_is_passed_on(given: Any) -> None:
    class Judged(Game):
        def get_reward(self) -> Any:
            return given

    class Awaited(Game):
        async def get_reward(self) -> Any:  # type: ignore[override]
            return given

    for kind in (Judged, Awaited):
        (reward,) = ToolBox(environment_factory=kind).rewards
        trajectory = [Trajectory((1,), (), StopReason.ANSWERED)]
        assert asyncio.run(reward(environments=[kind()], trajectory=trajectory)) == [given]


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
