"""A search server on this machine that behaves as a test asks."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """What the server does with a request, perhaps with a reset at the end."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    reset: bool = False


def result(lists: object) -> Reply:
    return Reply(json.dumps({"result": lists}).encode())


def echo(request: dict[str, Any]) -> Reply:
    """Search-R1's answer: one hit for each query, that names it."""
    documents = [{"contents": f"{request['topk']}\n{query}"} for query in request["queries"]]
    return result([[{"document": document, "score": 0.5}] for document in documents])


class Server:
    """Answers with `reply(request)`, and keeps the requests, who asked, and from which ports."""

    def __init__(self) -> None:
        self.reply: Callable[[dict[str, Any]], Reply] = echo
        self.requests: list[dict[str, Any]] = []
        self.credentials: list[str | None] = []
        self.connections: set[int] = set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.requests.append(request)
                server.credentials.append(self.headers["Authorization"])
                server.connections.add(self.client_address[1])
                self._send(server.reply(request))

            def _send(self, reply: Reply) -> None:
                self.send_response(reply.status)
                headers = {"Content-Length": str(len(reply.body)), **reply.headers}
                for name, value in headers.items():
                    self.send_header(name, value)
                try:
                    self.end_headers()
                    self.wfile.write(reply.body)
                except OSError:
                    self.close_connection = True  # The client has had enough.
                if reply.reset:
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    os.close(self.connection.detach())

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._http.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that hung up is no news
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/retrieve"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
