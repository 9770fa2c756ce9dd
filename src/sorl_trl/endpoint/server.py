"""The endpoint: an OpenAI-compatible address for the policy, with a key for each trajectory."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import socket
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from sorl_trl.command_line import listen
from sorl_trl.endpoint import completions, responses
from sorl_trl.endpoint.agents import AgentMistake, retrieve
from sorl_trl.endpoint.conversation import Call, Conversation
from sorl_trl.endpoint.requests import BadRequest, Body, Request, Served, check_fields, read_body, without_effect
from sorl_trl.rollout.turns import ApiRequest, ApiTurns, RunEnded
from sorl_trl.threads import start
from sorl_trl.types import StopReason

logger = logging.getLogger(__name__)

_APIS: Mapping[str, ModuleType] = {"/v1/chat/completions": completions, "/v1/responses": responses}
_GRACE_S = 5.0
"""How long an abandoned or undelivered turn is kept in case its request is sent again. Our choice."""
_REMEMBERED = 256
"""How many requests per trajectory are kept for this."""
_KEY = "sorl-"
_LIMITED_BY = {
    StopReason.TRAJECTORY_LIMIT: "`max_completion_length` limits everything after the trajectory's first prompt",
    StopReason.CONTEXT_LIMIT: "the maximum context length is set by the model or by the memory for its KV cache",
}


class WrongKey(Exception):
    """A request without a valid trajectory key."""


@dataclass(frozen=True)
class CallLimits:
    """The most tokens of a turn, of a trajectory after its first prompt, and of a context."""

    turn: int
    trajectory: int | None
    window: int | None


@dataclass(eq=False)
class Run:
    """One trajectory: an API key, and the conversation under it."""

    number: int
    conversation: Conversation
    turns: ApiTurns
    limits: CallLimits
    constrains: bool = False
    """Whether the engine constrains turns to a JSON schema."""
    stop: Callable[[Exception], None] = lambda error: None
    """Called with the agent's mistake or the endpoint's failure. By default, only the agent is told."""
    warned: set[str] = field(default_factory=set)
    """Ignored fields that a warning has been logged for."""
    key: str = field(default_factory=lambda: f"{_KEY}{secrets.token_hex(16)}")
    has_ended: bool = False
    resent: int = 0
    """How many repeated requests got the turn of the first one."""
    limit_reached: StopReason | None = None
    """Which limit left no room for the last turn."""
    turns_of: dict[bytes, list[_SharedTurn]] = field(default_factory=dict)
    """The turns of each request, because a client may send one again."""

    def refuse(self, refusal: BadRequest) -> None:
        """Stop at an unsupported request, unless a template rejected what the policy wrote."""
        if refusal.code != "chat_template":
            self.fail(AgentMistake(f"The endpoint refused a request of the agent: {refusal}."), refusal)

    def fail(self, failure: Exception, cause: Exception) -> None:
        failure.__cause__ = cause
        self.stop(failure)

    def end(self) -> None:
        """End the run: the agent makes no more calls."""
        self.has_ended = True
        self.turns.end(self.number)


class Endpoint:
    """Serves Chat Completions and Responses to agents, in its own thread.

    Each key gives access to its own trajectory only. Requests wait as long as necessary, and none is answered with
    HTTP 429. Refusals carry `x-should-retry: false`, so that clients do not retry.

    Args:
        host: The address to listen on. 127.0.0.1 is reachable only from this machine.
        listener: The socket that listens there. Default: one at a free port.

    Raises ImportError if uvicorn is missing, and ValueError if the address is not available.
    """

    def __init__(self, host: str = "127.0.0.1", listener: socket.socket | None = None) -> None:
        check_installed()
        import uvicorn

        self._socket = listener or listen(host)
        name = f"[{host}]" if ":" in host else host
        self.base_url = f"http://{name}:{self._socket.getsockname()[1]}/v1"
        self._runs: dict[str, Run] = {}
        config = uvicorn.Config(
            self._serve_http,
            interface="asgi3",  # uvicorn does not recognize it by a bound method
            http="h11",
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_keep_alive=600,
        )
        self._server = uvicorn.Server(config)
        self._loop = asyncio.new_event_loop()
        start(self._serve, "sorl-endpoint")

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._server.serve([self._socket]))

    def admit(self, runs: Sequence[Run]) -> None:
        """Serve the calls of trajectories."""
        self._runs.update({run.key: run for run in runs})

    def dismiss(self, runs: Sequence[Run]) -> None:
        """Stop serving the calls of these trajectories. When this returns, none is in progress."""

        async def end() -> None:
            turns = [turn for run in runs for turns in run.turns_of.values() for turn in turns]
            for run in runs:
                run.has_ended = True
                self._runs.pop(run.key, None)
            for turn in turns:
                turn.drop()
            await asyncio.gather(*(turn.task for turn in turns), return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()

    # ---------------------------------------------------------------------------------------------------------------
    # HTTP
    # ---------------------------------------------------------------------------------------------------------------

    async def _serve_http(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one ASGI request. A client that closes the connection no longer waits."""
        body = await _body(receive)
        if scope["type"] != "http" or body is None:
            return
        answering = asyncio.ensure_future(self._answer(scope, body))
        leaving = asyncio.ensure_future(receive())
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                answering.cancel()
                return
            status, content, shared = answering.result()
            if shared is not None:
                shared.is_received = not leaving.done()
            await _send(send, status, content)
        finally:
            leaving.cancel()

    async def _answer(self, scope: Any, body: bytes) -> tuple[int, Any, _SharedTurn | None]:
        """HTTP status, content (JSON, or a list of events), and the turn that it contains."""
        run: Run | None = None
        try:
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
            run, path = self._run_of(headers), scope["path"].rstrip("/")
            if scope["method"] == "GET" and f"{path}/".startswith("/v1/models/"):
                name = path.removeprefix("/v1/models").strip("/")
                model = {"id": name or "policy", "object": "model", "created": 0, "owned_by": "sorl-trl"}
                return 200, model if name else {"object": "list", "data": [model]}, None
            if scope["method"] != "POST" or path not in _APIS:
                refusal = BadRequest(
                    f"{scope['method']} {path} is not supported: POST to {' or '.join(_APIS)}", "path"
                )
                if scope["method"] == "POST":
                    run.refuse(refusal)
                return 404, _error(str(refusal), "invalid_request_error", "not_found"), None
            api, asked = _APIS[path], read_body(body)
            shared = self._shared_turn(run, path, body, asked, headers)
            served = shared.served(asked, await shared.result())
            return 200, [*api.stream(served)] if asked.get("stream") else api.whole(served), shared
        except WrongKey as error:
            return 401, _error(str(error), "authentication_error", "invalid_api_key"), None
        except BadRequest as error:
            return 400, _error(str(error), "invalid_request_error", error.code, error.field), None
        except RunEnded as error:
            return 403, _error(str(error), "permission_error", "run_ended"), None
        except Exception as error:  # the agent is told, too
            logger.exception("The endpoint failed")
            if run is not None:
                run.fail(RuntimeError(f"The endpoint failed: {error!r}"), error)
            return 500, _error(f"{type(error).__name__}: {error}", "server_error"), None

    def _run_of(self, headers: Mapping[str, str]) -> Run:
        scheme, _, rest = headers.get("authorization", "").strip().partition(" ")
        key = rest.strip() if scheme.lower() == "bearer" else scheme
        run = self._runs.get(key)
        if run.has_ended if run else key.startswith(_KEY):
            raise RunEnded("this trajectory has ended (its agent returned, or its time is up), or never began")
        if run is None:
            raise WrongKey("unknown API key: use `endpoint.api_key`, or the key that `sorl serve-policy` printed")
        return run

    # ---------------------------------------------------------------------------------------------------------------
    # Turns
    # ---------------------------------------------------------------------------------------------------------------

    def _shared_turn(
        self, run: Run, path: str, body: bytes, asked: Mapping[str, Any], headers: Mapping[str, str]
    ) -> _SharedTurn:
        """The turn for a request: a new one, unless the client repeats a request.

        A request is a repeat if an identical one has an undelivered turn that no client waits for, or if it is marked
        as a retry.
        """
        turns = run.turns_of.setdefault(hashlib.sha256(path.encode() + body).digest(), [])
        received = [each for each in turns if each.is_received][-1:]
        turns[:] = received + [each for each in turns if not (each.is_received or each.has_failed)]
        lost = [each for each in turns if not each.is_received and not each.waiting]
        says_so = headers.get("x-stainless-retry-count", "0") != "0"
        if lost or (says_so and turns):
            run.resent += 1
            return (lost or turns)[-1]
        shared = _SharedTurn(self._turn(run, _APIS[path], asked), run.conversation)
        turns.append(shared)
        if len(run.turns_of) > _REMEMBERED:
            ended = (key for key, turns in run.turns_of.items() if all(each.task.done() for each in turns))
            run.turns_of.pop(next(ended, b""), None)
        return shared

    async def _turn(self, run: Run, api: ModuleType, asked: Mapping[str, Any]) -> Call:
        """The call of a new turn, with its answer."""
        try:
            check_fields(asked)
            request: Request = api.read(asked)
            call = run.conversation.begin(request)
        except BadRequest as refusal:
            run.refuse(refusal)
            raise
        turn: ApiRequest | None = None
        try:
            # A schema would keep the policy from calling tools.
            schema = request.schema if run.constrains and not (request.tools and request.may_call) else None
            _warn_of_ignored(run, without_effect(asked, api.FIELDS), request.schema != schema)
            call.limit = _room(run, call)
            wanted = [*call.context.token_ids], call.limit, request.stops, schema
            turn = ApiRequest(call.context.row, *wanted, run=run.number)
            run.turns.ask(turn)
            run.conversation.finish(call, await asyncio.wrap_future(turn.generation))
            return call
        except BaseException:
            if turn is not None:
                run.turns.withdraw(turn)
            run.conversation.cancel(call)
            raise


def check_installed() -> None:
    """Raise ImportError if uvicorn is missing."""
    if find_spec("uvicorn") is None:
        raise ImportError("the endpoint needs uvicorn: pip install 'sorl-trl[serve]'")


class _SharedTurn:
    """A turn that several requests may wait for. It is dropped some seconds after the last one stops waiting."""

    def __init__(self, turn: Coroutine[Any, Any, Call], conversation: Conversation) -> None:
        self.task = asyncio.ensure_future(turn)
        self.task.add_done_callback(retrieve)
        self.is_received = self.is_dropped = False
        self.waiting = 0
        self.response_id, self.created = uuid.uuid4().hex[:24], int(time.time())
        self._conversation = conversation
        self._timer: asyncio.TimerHandle | None = None

    @property
    def has_failed(self) -> bool:
        return self.is_dropped or (self.task.done() and (self.task.cancelled() or self.task.exception() is not None))

    async def result(self) -> Call:
        self.waiting += 1
        if self._timer is not None:
            self._timer.cancel()
        try:
            call = await asyncio.shield(self.task)
            self.is_received = True  # or another request would take it up before it is sent
            return call
        except asyncio.CancelledError as error:
            if self.task.cancelled():
                raise RunEnded("this trajectory has ended") from error
            raise
        finally:
            self.waiting -= 1
            if not self.waiting:
                self._timer = asyncio.get_running_loop().call_later(_GRACE_S, self.drop)

    def served(self, body: Body, call: Call) -> Served:
        """The turn as the answer to a request."""
        assert call.answer is not None
        answer, read, written = call.answer, call.prompt_tokens, len(call.answer.turn.token_ids)
        return Served(body, answer.message, answer.finish_reason, read, written, self.response_id, self.created)

    def drop(self) -> None:
        """Drop the turn, and its tokens from the conversation, unless it was delivered."""
        if self.is_received or self.is_dropped:
            return
        if self.task.done() and not self.has_failed:
            self._conversation.cancel(self.task.result())
        self.is_dropped = True
        self.task.cancel()


def _warn_of_ignored(run: Run, found: dict[str, str], lacks_schema: bool) -> None:
    """Warn once per field that it has no effect."""
    if lacks_schema:
        found["response_format"] = "only vLLM constrains turns to a schema, and only turns that cannot call tools"
    for name in found.keys() - run.warned:
        run.warned.add(name)
        logger.warning("An agent sets `%s`, which has no effect: %s.", name, found[name])


def _room(run: Run, call: Call) -> int:
    """The most tokens for a call's turn. Raises BadRequest if there is no room.

    Its text begins as OpenAI's, by which LiteLLM and others recognize it.
    """
    limits, read = run.limits, len(call.context.token_ids)
    room = {StopReason.TURN_LIMIT: limits.turn}
    if limits.trajectory is not None:
        room[StopReason.TRAJECTORY_LIMIT] = limits.trajectory - run.conversation.completion_length
    if limits.window is not None:
        room[StopReason.CONTEXT_LIMIT] = limits.window - read
    reason, least = min(room.items(), key=lambda item: item[1])
    if least < 1:
        run.limit_reached = reason
        raise BadRequest(
            f"This model's maximum context length is {max(read + least, 0)} tokens. However, your messages resulted "
            f"in {read} tokens, which leaves {least} for an answer: {_LIMITED_BY[reason]}. Please reduce the length "
            "of the messages.",
            "messages",
            "context_length_exceeded",
        )
    run.limit_reached = None  # the agent has made room, if there was none
    return min(least, call.request.limit or least)


async def _body(receive: Any) -> bytes | None:
    """The body of a request; None if the client disconnected before sending it all."""
    body = bytearray()
    while (message := await receive())["type"] == "http.request":
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)
    return None


async def _send(send: Any, status: int, content: Any) -> None:
    is_whole = isinstance(content, dict)
    chunks = [json.dumps(content).encode()] if is_whole else content
    headers = [(b"content-type", b"application/json" if is_whole else b"text/event-stream; charset=utf-8")]
    if is_whole:
        headers.append((b"content-length", str(len(chunks[0])).encode()))
    if status != 200:
        headers.append((b"x-should-retry", b"false"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for chunk in chunks:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _error(message: str, kind: str, code: str | None = None, field: str | None = None) -> dict[str, Any]:
    """The body of an error response."""
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}
