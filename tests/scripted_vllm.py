"""In the place of vLLM: an engine and a server that sample from a script, for TRL's own wrapper."""

from __future__ import annotations

import base64
import io
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator
from trl.generation.vllm_generation import VLLMGeneration

WINDOW = 12
LOGPROB = -0.5
SETTINGS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def pretend_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The types by which vLLM is told how to sample: it is not installed here."""
    types = SimpleNamespace(SamplingParams=SimpleNamespace, StructuredOutputsParams=SimpleNamespace)
    types.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final only")
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", types)  # type: ignore[arg-type]


@dataclass
class Script:
    """What the policy samples after each context, cut where vLLM cuts: at the limit, at the window."""

    turns: Callable[[tuple[int, ...]], list[int]]
    requests: list[tuple[tuple[int, ...], dict[str, Any]]] = field(default_factory=list)
    """Contexts and settings, in the order in which they came."""
    routes: Callable[[list[int]], Any] | None = None
    """For each of these tokens the experts of all layers, as one array."""

    def sample(self, context: tuple[int, ...], settings: dict[str, Any]) -> list[int]:
        assert len(context) + settings["max_tokens"] <= WINDOW, "vLLM refuses it"
        self.requests.append((context, dict(settings)))
        return self.turns(context)[: settings["max_tokens"]]

    def routes_of(self, context: tuple[int, ...], turn: list[int]) -> Any:
        """What vLLM reports: of the tokens that it has read."""
        return None if self.routes is None else self.routes([*context, *turn][:-1])


class ScriptedLLM:
    """`vllm.LLM`: each step of its engine gives every request one token."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.log: list[str] = []
        self.running: dict[str, tuple[list[int], int]] = {}
        self.routes: dict[str, Any] = {}
        self.llm_engine = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=WINDOW),
            add_request=self.add_request,
            abort_request=self.abort_request,
            step=self.step,
        )

    def add_request(self, request_id: str, prompt: dict[str, Any], params: Any) -> None:
        assert request_id not in self.running
        self.log.append(f"add {request_id}")
        context = tuple(prompt["prompt_token_ids"])
        self.running[request_id] = (self.script.sample(context, vars(params)), 0)
        self.routes[request_id] = self.script.routes_of(context, self.running[request_id][0])

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.log.append(f"abort {request_id}")
            del self.running[request_id]

    def step(self) -> list[Any]:
        self.log.append("step")
        ended = []
        for name, (turn, sampled) in list(self.running.items()):
            self.running[name] = (turn, sampled + 1)
            if sampled + 1 == len(turn):
                del self.running[name]
                ended.append(_output(name, turn, self.routes[name]))
        return ended[::-1]

    def reset_prefix_cache(self) -> None:
        assert not self.running, "vLLM refuses it while there are requests"
        self.log.append("forget")


def _output(name: str, turn: list[int], routes: Any) -> Any:
    """vLLM may report the most probable token beside the sampled one."""
    logprobs = [{-1: SimpleNamespace(logprob=-0.1), token: SimpleNamespace(logprob=LOGPROB)} for token in turn]
    completion = SimpleNamespace(token_ids=turn, logprobs=logprobs, finish_reason="stop", routed_experts=routes)
    return SimpleNamespace(request_id=name, outputs=[completion])


def scripted_wrapper(mode: str, **more: Any) -> Any:
    """TRL's wrapper as its constructor leaves it."""
    wrapper: Any = object.__new__(VLLMGeneration)
    vars(wrapper).update(SETTINGS, mode=mode, max_completion_length=99, generation_kwargs={}, logprobs=0)
    vars(wrapper).update(structured_outputs_regex=None, tensor_parallel_size=1, enable_sleep_mode=False)
    wrapper.accelerator = Accelerator(cpu=True)
    wrapper._llm_weights_sleeping = False
    vars(wrapper).update(more)
    return wrapper


class ScriptedServer(ThreadingHTTPServer):
    """Answers as `vllm serve` does, unless a behaviour is due: then that, once."""

    daemon_threads = True

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = script
        self.behaviours: list[Callable[[_Handler], None]] = []
        self.bodies: list[dict[str, Any]] = []
        """Of all requests for turns."""
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone is no error here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ScriptedServer

    def do_GET(self) -> None:
        self.answer({"data": [{"id": "policy", "max_model_len": WINDOW}]} if self.path == "/v1/models" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        if self.server.behaviours:
            self.server.behaviours.pop(0)(self)
            return
        choices = [{"index": i, **self._turn(tuple(context), body)} for i, context in enumerate(body["prompt"])]
        self.answer({"choices": choices[::-1]})  # nobody promises an order

    def _turn(self, context: tuple[int, ...], body: dict[str, Any]) -> dict[str, Any]:
        turn = self.server.script.sample(context, body)
        routes, file = self.server.script.routes_of(context, turn), io.BytesIO()
        if routes is not None:
            np.save(file, routes)
        return {
            "token_ids": turn,
            "logprobs": {"token_logprobs": [LOGPROB] * len(turn)},
            "finish_reason": "length",
            "routed_experts": None if routes is None else base64.b64encode(file.getvalue()).decode(),
        }

    def answer(self, body: Any, status: int = 200) -> None:
        encoded = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, *_: Any) -> None: ...


def break_off(handler: _Handler) -> None:
    """Die in the middle of an answer."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
    handler.close_connection = True


def hang(handler: _Handler) -> None:
    """Until the client has gone."""
    assert handler.rfile.read(1) == b""
    handler.close_connection = True


def fail_with(status: int, message: str) -> Callable[[_Handler], None]:
    return lambda handler: handler.answer({"error": {"message": message}}, status)


@contextmanager
def scripted_server(script: Script) -> Iterator[ScriptedServer]:
    server = ScriptedServer(script)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
