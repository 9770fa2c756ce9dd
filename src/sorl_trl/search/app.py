"""The web application that serves one index, in Search-R1's wire format; `serve` runs it and describes the format."""

# No `from __future__ import annotations`, because FastAPI evaluates the annotations of functions within functions.

from typing import TYPE_CHECKING, Annotated, Any

from sorl_trl.search.corpus import as_contents
from sorl_trl.search.engines.saved import SavedIndex
from sorl_trl.text import encodable
from sorl_trl.types import Passage

if TYPE_CHECKING:
    from fastapi import FastAPI

DEFAULT_TOPK = 3
"""The default of Search-R1."""
# The limits of one request (ours). Search-R1 sends at most 512 prompts of 5 trajectories at once.
MOST_QUERIES = 4096
HIGHEST_TOPK = 100
LONGEST_QUERY = 10_000


def create_app(index: SavedIndex) -> "FastAPI":
    """The server of one index, as an ASGI application. Raises ImportError if FastAPI or uvicorn is missing."""
    try:
        import uvicorn  # noqa: F401 - `serve` runs the application with it
        from fastapi import FastAPI
        from fastapi.responses import JSONResponse
    except ImportError as error:
        raise ImportError("the search server needs: pip install 'sorl-trl[serve]'") from error

    app = FastAPI(title="sorl_trl search", docs_url=None, redoc_url=None)
    _add_retrieve(app, index)

    @app.get("/health")
    async def health() -> JSONResponse:
        # `async` keeps it out of the thread pool, where it would wait for searches: clients have short timeouts.
        state = {"status": "ok", "engine": index.engine, "documents": len(index), "identity": index.identity}
        return JSONResponse(state)

    return app


def _add_retrieve(app: "FastAPI", index: SavedIndex) -> None:
    from fastapi.responses import JSONResponse
    from pydantic import BaseModel, BeforeValidator, Field

    class RetrieveRequest(BaseModel):
        queries: Annotated[
            list[Annotated[str, Field(max_length=LONGEST_QUERY), BeforeValidator(_clean)]],
            Field(max_length=MOST_QUERIES),
        ]
        topk: Annotated[int, Field(ge=1, le=HIGHEST_TOPK)] | None = None
        return_scores: bool | None = None

    @app.post("/retrieve")
    def retrieve(request: RetrieveRequest) -> JSONResponse:
        # Without `async` it runs in a thread pool, and the server continues to listen.
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
    # Pydantic refuses half a surrogate pair, which JSON can spell. A policy may write one, which is no error.
    return encodable(query) if isinstance(query, str) else query
