"""The web application that serves one index, in Search-R1's wire format; `serve` runs it and describes the format."""

# Without `from __future__ import annotations`: FastAPI reads the annotations of what is defined inside a function.

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from sorl_trl.search.corpus import as_contents
from sorl_trl.search.engines.saved import SavedIndex
from sorl_trl.text import encodable
from sorl_trl.types import Passage

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

DEFAULT_TOPK = 3
"""Search-R1's."""
INSTALL_HINT = "the search server needs: pip install 'sorl-trl[serve]'"


@dataclass(frozen=True)
class ServerLimits:
    """What one request may ask for (ours).

    `queries` holds what Search-R1 sends at once, 512 prompts of 5 trajectories, with room to spare.
    """

    request_bytes: int = 16 << 20
    queries: int = 4096
    topk: int = 100
    query_characters: int = 10_000


def create_app(index: SavedIndex, limits: ServerLimits | None = None) -> "FastAPI":
    """The server of one index, as an ASGI application.

    Raises:
        ImportError: FastAPI is not installed.
    """
    try:
        from fastapi import FastAPI
        from fastapi.exceptions import RequestValidationError
        from fastapi.responses import JSONResponse
    except ImportError as error:
        raise ImportError(INSTALL_HINT) from error

    app = FastAPI(title="sorl_trl search", docs_url=None, redoc_url=None)
    limits = limits or ServerLimits()
    app.add_middleware(RequestSizeLimit, request_bytes=limits.request_bytes)
    _add_retrieve(app, index, limits)

    @app.get("/health")
    async def health() -> JSONResponse:
        # Not in the pool of threads, where it would wait for searches: clients ask with a short timeout.
        state = {"status": "ok", "engine": index.engine, "documents": len(index), "identity": index.identity}
        return JSONResponse(state)

    @app.exception_handler(RequestValidationError)
    def refuse(_: Any, error: RequestValidationError) -> JSONResponse:
        return JSONResponse({"detail": "; ".join(map(_complaint, error.errors()))}, status_code=422)

    return app


def _add_retrieve(app: "FastAPI", index: SavedIndex, limits: ServerLimits) -> None:
    from fastapi.responses import JSONResponse
    from pydantic import BaseModel, BeforeValidator, Field

    class RetrieveRequest(BaseModel):
        queries: Annotated[
            list[Annotated[str, Field(max_length=limits.query_characters), BeforeValidator(_clean)]],
            Field(max_length=limits.queries),
        ]
        topk: Annotated[int, Field(ge=1, le=limits.topk)] | None = None
        return_scores: bool | None = None

    @app.post("/retrieve")
    def retrieve(request: RetrieveRequest) -> JSONResponse:
        # Not `async`: so it runs in a pool of threads, and the server goes on listening meanwhile.
        found = index.search_batch(request.queries, request.topk or DEFAULT_TOPK)
        with_scores = bool(request.return_scores)
        return JSONResponse({"result": [[_hit(passage, with_scores) for passage in hits] for hits in found]})


def _hit(passage: Passage, with_score: bool) -> dict[str, Any]:
    document = {
        "id": passage.id,
        "title": passage.title,
        "text": passage.text,
        "contents": as_contents(passage),
    }
    return {"document": document, "score": passage.score} if with_score else document


def _clean(query: Any) -> Any:
    # JSON can spell half a surrogate pair, and pydantic refuses it; but what a policy writes is no error.
    return encodable(query) if isinstance(query, str) else query


def _complaint(error: Mapping[str, Any]) -> str:
    """One finding of pydantic's as "topk: Input should be less than or equal to 100, got 101"."""
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"][1:]).lstrip(".")
    value = repr(error["input"])
    # A request too long would otherwise come back whole.
    got = value if len(value) <= 80 else f"{value[:77]}..."
    return f"{place or 'request'}: {error['msg']}, got {got}"


class RequestSizeLimit:
    """ASGI middleware: answers 413 to a body above `request_bytes`, whether or not its length was declared.

    What is too large is read to its end, and forgotten: a client that is still sending would not see the answer.
    """

    def __init__(self, app: "ASGIApp", request_bytes: int) -> None:
        self._app = app
        self._request_bytes = request_bytes

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        body, size, more = bytearray(), 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
            body = body + message.get("body", b"") if size <= self._request_bytes else bytearray()
        if size > self._request_bytes:
            return await self._refuse(size, scope, receive, send)
        await self._app(scope, _replay(bytes(body), receive), send)

    async def _refuse(self, size: int, scope: "Scope", receive: "Receive", send: "Send") -> None:
        from starlette.responses import JSONResponse

        detail = f"the request must have at most {self._request_bytes} bytes, got {size}"
        await JSONResponse({"detail": detail}, status_code=413)(scope, receive, send)


def _replay(body: bytes, receive: "Receive") -> "Receive":
    """`receive` for a body that was read already; after it, whatever else comes."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> "Message":
        return pending.pop() if pending else await receive()

    return receive_again
