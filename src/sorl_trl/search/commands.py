"""The commands `sorl index` and `sorl serve`, and the web application that serves an index in Search-R1's wire format.

`POST /retrieve` takes

    {"queries": ["…"], "topk": 3, "return_scores": true}

where `topk` (3 by default) and `return_scores` (false) may be missing or null, and returns a list per query:

    {"result": [[{"document": {"id", "title", "text", "contents"}, "score": 1.5}]]}

or, without scores, the documents themselves: `{"result": [[{"id", "title", "text", "contents"}]]}`. `contents` is the
title in quotes, a newline, and the text. Any other request is refused, with 422.

SIGTERM or SIGINT ends the server with exit code 0, once the open requests are answered.
"""

# No `from __future__ import annotations`, because FastAPI evaluates the annotations of functions within functions.

import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

from tqdm.auto import tqdm

from sorl_trl.command_line import Parser, UserMistake, listen, mistakes
from sorl_trl.search.bm25 import BM25Index
from sorl_trl.search.corpus import as_contents
from sorl_trl.text import encodable
from sorl_trl.types import Passage

if TYPE_CHECKING:
    from fastapi import FastAPI

ABOUT_INDEX = """\
Builds a search index of a corpus in the folder DIR, for `sorl serve` and for `--index` of `sorl train` and
`sorl evaluate`.

example: sorl index --corpus corpus.jsonl --output index
"""
ABOUT_SERVE = """\
Serves a search index over HTTP, in Search-R1's wire format, until Ctrl-C. It prints the address to pass as
`--search_url` to `sorl train` and `sorl evaluate`.

example: sorl serve --index index --port 8000
"""
SHUTDOWN_S = 30
"""Time limit in seconds for open requests when the server stops."""
DEFAULT_TOPK = 3
"""The default of Search-R1."""


def index(words: Sequence[str] | None = None) -> None:
    """Run `sorl index`."""
    parser = Parser(prog="sorl index", description=ABOUT_INDEX)
    corpus = "JSONL files; each line has `id` and `contents`, as in wiki-18, or `id`, `title` and `text` (required)"
    parser.add_argument("--corpus", nargs="+", required=True, metavar="PATH", help=corpus)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="the folder to create (required)")
    options = parser.parse_args(words)
    if options.output.exists():
        raise UserMistake(f"`--output` is {str(options.output)!r}, which exists: delete it, or choose another folder")
    with mistakes():
        built = BM25Index.build(options.corpus, options.output)
    size = sum(path.stat().st_size for path in options.output.rglob("*") if path.is_file())
    print(f"{len(built):,} passages, {tqdm.format_sizeof(size, 'B')}, in {options.output} ({built.identity})")


def serve(words: Sequence[str] | None = None) -> None:
    """Run `sorl serve` until it is stopped."""
    parser = Parser(prog="sorl serve", description=ABOUT_SERVE)
    parser.add_argument("--index", required=True, metavar="DIR", help="a folder made by `sorl index` (required)")
    parser.add_address()
    options = parser.parse_args(words)
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn stops cleanly at a signal, then raises it again. Being told to stop is a success, even while loading.
        signal.signal(number, _exit)
    with mistakes():
        served = BM25Index.load(options.index)
        app = create_app(served)
    listener = listen(options.host, options.port)
    host, port = listener.getsockname()[:2]
    print(f"{len(served):,} passages ({served.identity}) on http://{host}:{port}/retrieve", flush=True)

    import uvicorn  # create_app explains how to install it

    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=SHUTDOWN_S)
    uvicorn.Server(config).run(sockets=[listener])


def create_app(index: BM25Index) -> "FastAPI":
    """The server of one index, as an ASGI application. Raises ImportError if FastAPI or uvicorn is missing."""
    try:
        import uvicorn  # noqa: F401 - `serve` runs the application with it
        from fastapi import FastAPI
    except ImportError as error:
        raise ImportError("the search server needs: pip install 'sorl-trl[serve]'") from error

    from fastapi.responses import JSONResponse
    from pydantic import BaseModel, BeforeValidator, Field

    app = FastAPI(title="sorl_trl search", docs_url=None, redoc_url=None)
    # Pydantic refuses lone surrogates, which JSON can express. A policy may write one, which is not an error.
    clean = BeforeValidator(lambda query: encodable(query) if isinstance(query, str) else query)

    class RetrieveRequest(BaseModel):
        queries: list[Annotated[str, clean]]
        topk: Annotated[int, Field(ge=1)] | None = None
        return_scores: bool | None = None

    @app.post("/retrieve")
    def retrieve(request: RetrieveRequest) -> JSONResponse:
        # Without `async` it runs in a thread pool, and the server continues to listen.
        found = index.search_batch(request.queries, request.topk or DEFAULT_TOPK)
        return JSONResponse({"result": [[_hit(hit, bool(request.return_scores)) for hit in hits] for hits in found]})

    return app


def _hit(passage: Passage, with_score: bool) -> dict[str, Any]:
    document = {"id": passage.id, "title": passage.title, "text": passage.text, "contents": as_contents(passage)}
    return {"document": document, "score": passage.score} if with_score else document


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)
