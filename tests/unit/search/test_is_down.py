"""Which errors of a service mean that it is down, whichever client raised them."""

from __future__ import annotations

import asyncio
import errno
import http.client
import socket
import ssl
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
import requests

from sorl_trl.search import SearchError, SearchUnavailable
from sorl_trl.search.backend import is_down


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
    client_error = of("openai", "OpenAIError", "APIConnectionError")
    assert is_down(caused(first, client_error))
    assert is_down(caused(first, OSError("inner"), client_error, RuntimeError("no judge")))
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
