"""What an API call costs beside the sampling: milliseconds of processor time, for each API, whole and streamed.

    python -m benchmarks.endpoint
    python -m benchmarks.endpoint --calls 32   # of longer histories

An agent of `http.client` calls a tool in each of its turns, and sends its whole history each time. The policy is a
script. Threads are measured by their own clocks, which the client does not move, and other processes little: of
five rollouts, the least counts.

- `endpoint`: the thread that reads requests, renders them, finds their contexts, and writes answers;
- `HTTP alone`: the thread of the same HTTP server that is sent the same and answers the same, without all this;
- `schedule`: the trainer's thread, which takes the turns and makes trajectories of them, without the policy's script.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPConnection
from typing import Any

from tests.endpoint import END, ScriptedEngine, setup_of
from tests.tools import qwen_tokenizer, tool_call

from benchmarks.common import table
from benchmarks.rollout.engines import cpu_of_thread
from sorl_trl.command_line import Parser, at_least, listen, run_command
from sorl_trl.endpoint import EndpointRollout
from sorl_trl.threads import start

TRAJECTORIES, ROLLOUTS = 8, 5
FACT = "Oslo lies at the end of a fjord, between hills and forests, and has been the capital of Norway since 1814. "
SYSTEM, FOUND, QUESTION = FACT * 8, FACT * 12, "Where is Oslo?"
"""In a language model's tokens: about 200, 300 and 5."""
SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
TOOL = {"name": "search", "description": "Search the atlas."}
WRITTEN = json.dumps({"query": QUESTION})
"""The arguments of each call."""


def chat(turns: int) -> dict[str, Any]:
    """A request after this many turns."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    for turn in range(turns):
        call = {"id": f"call{turn}", "type": "function", "function": {"name": "search", "arguments": WRITTEN}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call{turn}", "content": FOUND})
    return {"messages": messages, "tools": [{"type": "function", "function": {**TOOL, "parameters": SCHEMA}}]}


def responses(turns: int) -> dict[str, Any]:
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    for turn in range(turns):
        items.append({"type": "function_call", "call_id": f"call{turn}", "name": "search", "arguments": WRITTEN})
        items.append({"type": "function_call_output", "call_id": f"call{turn}", "output": FOUND})
    return {"instructions": SYSTEM, "input": items, "tools": [{"type": "function", **TOOL, "parameters": SCHEMA}]}


def messages(turns: int) -> dict[str, Any]:
    said: list[Any] = [{"role": "user", "content": QUESTION}]
    for turn in range(turns):
        call = {"type": "tool_use", "id": f"call{turn}", "name": "search", "input": json.loads(WRITTEN)}
        found = {"type": "tool_result", "tool_use_id": f"call{turn}", "content": FOUND}
        said += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [found]}]
    return {"max_tokens": 999, "system": SYSTEM, "messages": said, "tools": [{**TOOL, "input_schema": SCHEMA}]}


APIS: dict[str, Callable[[int], dict[str, Any]]] = {
    "/chat/completions": chat,
    "/responses": responses,
    "/messages": messages,
}


class TimedEngine(ScriptedEngine):
    """Knows how much of its thread's processor time it has taken."""

    seconds = 0.0

    def poll(self) -> Any:
        began = time.thread_time()
        ended = super().poll()
        self.seconds += time.thread_time() - began
        return ended


def ask(address: str, key: str, path: str, bodies: Sequence[bytes]) -> list[bytes]:
    """The answers to requests, one after the other."""
    connection, answers = HTTPConnection(address), []
    for body in bodies:
        connection.request("POST", f"/v1{path}", body, {"Authorization": f"Bearer {key}"})
        reply = connection.getresponse()
        answers.append(reply.read())
        if reply.status != 200:
            raise RuntimeError(f"{path} was answered with {reply.status} {answers[-1]!r:.300}")
    connection.close()
    return answers


def measure(path: str, stream: bool, size: int) -> list[float]:
    """Milliseconds per call of trajectories of this `size`: of the endpoint, of HTTP alone, and of the schedule."""
    asked = [{"model": "policy", "stream": stream, **APIS[path](turns)} for turns in range(size)]
    bodies = [json.dumps(each).encode() for each in asked]
    answers = list[bytes]()

    def agent(example: Any, endpoint: Any) -> float:
        address = endpoint.base_url.removeprefix("http://").removesuffix("/v1")
        answers[:] = ask(address, endpoint.api_key, path, bodies)
        return 1.0

    tokenizer = qwen_tokenizer([FACT])
    turn = tool_call("search", query=QUESTION) + END
    engine = TimedEngine(lambda row, ids: turn, tokenizer)
    rollout, setup = EndpointRollout(agent), setup_of(tokenizer)

    def calls(trajectories: int = TRAJECTORIES) -> tuple[float, float]:
        began, engine.seconds, cpu_began = time.thread_time(), 0.0, cpu_of_thread("sorl-endpoint")
        _, metrics = rollout.collect(setup, [""] * trajectories, [{}] * trajectories, engine)
        if metrics["endpoint/extended"] != size - 1:
            raise RuntimeError(f"{path} has extended {metrics['endpoint/extended']} calls, not {size - 1}")
        return cpu_of_thread("sorl-endpoint") - cpu_began, time.thread_time() - began - engine.seconds

    calls(1)  # to warm up
    endpoint, schedule = map(min, zip(*(calls() for _ in range(ROLLOUTS)), strict=True))
    alone = HTTPAlone(dict(zip(bodies, answers, strict=True)))
    alone.seconds(path)
    http = min(alone.seconds(path, TRAJECTORIES) for _ in range(ROLLOUTS))
    return [1000 * each / size / TRAJECTORIES for each in (endpoint, http, schedule)]


class HTTPAlone:
    """The endpoint's HTTP server, which answers what it is told to."""

    def __init__(self, answers: Mapping[bytes, bytes]) -> None:
        import uvicorn

        self._answers, socket = answers, listen("127.0.0.1")
        self._address = f"127.0.0.1:{socket.getsockname()[1]}"
        self._thread = f"http-{self._address}"
        options: dict[str, Any] = {"http": "h11", "ws": "none", "loop": "asyncio", "lifespan": "off"}
        config = uvicorn.Config(self._answer, interface="asgi3", log_level="warning", access_log=False, **options)
        server = uvicorn.Server(config)
        start(lambda: server.run([socket]), self._thread)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        body, message = b"", {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            body += message["body"]
        answer = self._answers[body]
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    def seconds(self, path: str, trajectories: int = 1) -> float:
        """Processor time for all requests of so many trajectories."""
        began = cpu_of_thread(self._thread)
        for _ in range(trajectories):
            ask(self._address, "key", path, [*self._answers])
        return cpu_of_thread(self._thread) - began


def main(words: Sequence[str]) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--calls", type=at_least(1), default=8, help="of each trajectory")
    size = parser.parse_args(words).calls
    logging.disable(logging.WARNING)
    rows = []
    for path in APIS:
        for stream in (False, True):
            figures = [f"{each:.2f}" for each in measure(path, stream, size)]
            rows.append([f"`/v1{path}`", "streamed" if stream else "whole", *figures])
    print(table(["API", "answers", "endpoint", "HTTP alone", "schedule"], rows, left=2))


if __name__ == "__main__":
    sys.exit(run_command(main))
