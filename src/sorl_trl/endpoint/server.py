"""The endpoint: an address for the policy with the APIs of OpenAI and Anthropic, and a key for each trajectory."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import socket
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from sorl_trl.command_line import listen
from sorl_trl.endpoint import anthropic, completions, responses
from sorl_trl.endpoint.conversation import Call
from sorl_trl.endpoint.requests import BadRequest, Body, read_body
from sorl_trl.endpoint.run import KEY, Run, SharedTurn, all_answers, room_for, warn_of_ignored
from sorl_trl.rollout.turns import ApiRequest, RunEnded
from sorl_trl.threads import start

logger = logging.getLogger(__name__)

_COUNT = "/messages/count_tokens"
_APIS: Mapping[str, ModuleType] = {
    "/chat/completions": completions,
    "/responses": responses,
    "/messages": anthropic,
    _COUNT: anthropic,
}
_MOST_BYTES = 2**25
"""The most bytes of a request, as for Anthropic."""
_REMEMBERED = 256
"""How many requests per trajectory are kept for this."""


class WrongKey(Exception):
    """A request without a valid trajectory key."""


class Endpoint:
    """Serves Chat Completions, Responses and Anthropic's Messages to agents, in its own thread.

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
            status, content, turns = answering.result()
            for turn in turns:
                turn.is_received = not leaving.done()
            await _send(send, status, content)
        finally:
            leaving.cancel()

    async def _answer(self, scope: Any, body: bytes) -> tuple[int, Any, Sequence[SharedTurn]]:
        """HTTP status, content (JSON, or a list of events), and the turns that it contains."""
        run: Run | None = None
        path = re.sub("^(/v1)+", "", scope["path"].rstrip("/"))  # clients of Anthropic add it to their address
        api = _APIS.get(path, completions)
        try:
            if path == "/health":
                return 200, {"status": "ok"}, ()
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
            run = self._run_of(headers)
            if scope["method"] == "GET" and f"{path}/".startswith("/models/"):
                name = path.removeprefix("/models").strip("/")
                model = {"id": name or "policy", "object": "model", "created": 0, "owned_by": "sorl-trl"}
                return 200, model if name else {"object": "list", "data": [model]}, ()
            if scope["method"] != "POST" or path not in _APIS:
                raise self._not_found(run, scope)
            if len(body) > _MOST_BYTES:
                raise BadRequest(f"the request has more than {_MOST_BYTES} bytes", code="too_large", status=413)
            asked = read_body(body)
            if path == _COUNT:
                return 200, {"input_tokens": self._count(run, asked)}, ()
            turns = self._shared_turns(run, path, body, asked, headers)
            answers = await all_answers(turns)
            return 200, [*api.stream(asked, *answers)] if asked.get("stream") else api.whole(asked, *answers), turns
        except WrongKey as error:
            return 401, api.error(401, str(error), "invalid_api_key"), ()
        except BadRequest as error:
            return error.status, api.error(error.status, str(error), error.code, error.field), ()
        except RunEnded as error:
            return 403, api.error(403, str(error), "run_ended"), ()
        except Exception as error:  # the agent is told, too
            logger.exception("The endpoint failed")
            if run is not None:
                run.fail(RuntimeError(f"The endpoint failed: {error!r}"), error)
            return 500, api.error(500, f"{type(error).__name__}: {error}"), ()

    def _run_of(self, headers: Mapping[str, str]) -> Run:
        scheme, _, rest = headers.get("authorization", "").strip().partition(" ")
        given = (rest if scheme.lower() == "bearer" else scheme, headers.get("x-api-key", ""))
        keys = [key.strip() for key in given]
        run = next((self._runs[key] for key in keys if key in self._runs), None)
        if run.has_ended if run else any(key.startswith(KEY) for key in keys):
            raise RunEnded("this trajectory has ended (its agent returned, or its time is up), or never began")
        if run is None:
            raise WrongKey("unknown API key: use `endpoint.api_key`, or the key that `sorl serve-policy` printed")
        return run

    def _not_found(self, run: Run, scope: Any) -> BadRequest:
        """The refusal of a path, which ends the rollout if an agent asks for another API."""
        served = " or ".join(f"/v1{path}" for path in _APIS)
        refusal = BadRequest(
            f"{scope['method']} {scope['path']} is not supported: POST to {served}", "path", "not_found", 404
        )
        if scope["method"] == "POST" and scope["path"].startswith("/v1/"):
            run.refuse(refusal)
        return refusal

    def _count(self, run: Run, asked: Body) -> int:
        """How many tokens the policy would read for a request."""
        call = self._begun(run, anthropic, asked)
        run.conversation.cancel(call)
        return call.prompt_tokens

    # ---------------------------------------------------------------------------------------------------------------
    # Turns
    # ---------------------------------------------------------------------------------------------------------------

    def _shared_turns(
        self, run: Run, path: str, body: bytes, asked: Body, headers: Mapping[str, str]
    ) -> list[SharedTurn]:
        """The turns for a request, of which `n` asks for several: new ones, unless the client repeats a request.

        A request is a repeat if an identical one has an undelivered turn that no client waits for, or if it is marked
        as a retry.
        """
        api = _APIS[path]
        size = completions.choices(asked) if api is completions else 1
        says_so = headers.get("x-stainless-retry-count", "0") != "0"
        found = []
        for number in range(size):
            key = hashlib.sha256(f"{path} {number} ".encode() + body).digest()
            turns = run.turns_of.setdefault(key, [])
            received = [each for each in turns if each.is_received][-1:]
            turns[:] = received + [each for each in turns if not (each.is_received or each.has_failed)]
            lost = [each for each in turns if not each.is_received and not each.waiting]
            if lost or (says_so and turns):
                run.resent += 1
                found.append((lost or turns)[-1])
            else:
                turns.append(SharedTurn(self._turn(run, api, asked, size - number), run.conversation))
                found.append(turns[-1])
            found[-1].join()
            if len(run.turns_of) > _REMEMBERED:
                ended = (key for key, turns in run.turns_of.items() if all(each.task.done() for each in turns))
                run.turns_of.pop(next(ended, b""), None)
        return found

    def _begun(self, run: Run, api: ModuleType, asked: Body) -> Call:
        try:
            return run.conversation.begin(api.read(asked, run.conversation.calls))
        except BadRequest as refusal:
            run.refuse(refusal)
            raise

    async def _turn(self, run: Run, api: ModuleType, asked: Body, sharing: int) -> Call:
        """The call of a new turn, with its answer. `sharing` turns share the room that the trajectory has left."""
        call = self._begun(run, api, asked)
        turn: ApiRequest | None = None
        try:
            request = call.request
            # A schema would keep the policy from calling tools.
            schema = request.schema if run.constrains and not (request.tools and request.may_call) else None
            call.limit = room_for(run, call, sharing)
            wanted = [*call.context.token_ids], call.limit, request.stops, schema
            turn = ApiRequest(call.context.row, *wanted, run=run.number)
            run.turns.ask(turn)
            answer = run.conversation.finish(call, await asyncio.wrap_future(turn.generation))
            warn_of_ignored(run, call, request.schema != schema, request.logprobs and answer.logprobs is None)
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


async def _body(receive: Any) -> bytes | None:
    """The body of a request; None if the client disconnected before sending it all."""
    body = bytearray()
    while (message := await receive())["type"] == "http.request":
        if len(body) <= _MOST_BYTES:  # the rest of a larger body is not kept
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
