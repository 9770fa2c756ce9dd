"""Serve an index to many processes: `python -m sorl_trl.search.serve --index index/ --port 8000`.

The wire format is Search-R1's. `POST /retrieve` takes

    {"queries": ["…"], "topk": 3, "return_scores": true}

where `topk` (3 by default) and `return_scores` (false) may be missing or null, and returns a list per query:

    {"result": [[{"document": {"id", "title", "text", "contents"}, "score": 1.5}]]}

or, without scores, the documents themselves: `{"result": [[{"id", "title", "text", "contents"}]]}`. `contents` is the
title in quotes, a newline, and the text. A request with too many queries, a query that is too long, or a `topk` that
is too high is refused as a whole, with 422.

`GET /health` returns `{"status": "ok", "engine", "documents", "identity"}`.

SIGTERM or SIGINT ends the server with exit code 0, once the requests under way are answered.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Sequence
from types import FrameType

from sorl_trl.command_line import Parser, mistakes, refuse, run_command
from sorl_trl.search.app import create_app
from sorl_trl.search.engines import open_index

ABOUT = """\
Serves a search index over HTTP, in Search-R1's wire format, until Ctrl-C. It prints the address to pass as
`--search_url` to `sorl train` and `sorl evaluate`.

example: sorl serve --index index --port 8000
"""
SHUTDOWN_S = 30
"""How long requests under way may take after the server was told to stop."""
PENDING_CONNECTIONS = 2048


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until told to stop."""
    options = _parser().parse_args(arguments)
    if not 0 <= options.port < 2**16:
        refuse(f"`--port` is {options.port}, but must be from 0 to 65535")
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn stops cleanly at a signal, then raises it again. Being told to stop is a success, even while loading.
        signal.signal(number, _exit)
    with mistakes():
        index = open_index(options.index)
        app = create_app(index)
        listener = _listen(options.host, options.port)
    host, port = listener.getsockname()[:2]
    print(f"{len(index):,} passages ({index.identity}) on http://{host}:{port}/retrieve", flush=True)

    import uvicorn  # create_app says how to install it

    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=SHUTDOWN_S)
    uvicorn.Server(config).run(sockets=[listener])


def _parser() -> Parser:
    usage = "sorl serve --index DIR [--host ADDRESS] [--port N]"
    parser = Parser(prog="sorl serve", usage=usage, description=ABOUT)
    parser.add_argument("--index", required=True, metavar="DIR", help="what `sorl index` made (required)")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--port", type=int, default=8000, metavar="N", help="0 chooses a free one (default: %(default)s)"
    )
    return parser


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def _listen(host: str, port: int) -> socket.socket:
    """A socket that already listens, so that a port in use is noticed before anything runs."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=PENDING_CONNECTIONS)


if __name__ == "__main__":
    sys.exit(run_command(main))
