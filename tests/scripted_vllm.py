"""In the place of vLLM: an engine and a server that say what a script says. TRL's wrapper around them is its own."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration

WINDOW = 12
LOGPROB = -0.5
SETTINGS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def pretend_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The types by which vLLM is told how to sample: it is not installed here."""
    types = SimpleNamespace(SamplingParams=SimpleNamespace, StructuredOutputsParams=SimpleNamespace)
    types.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final only")
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", types)  # type: ignore[arg-type]
    for name in ("SamplingParams", "StructuredOutputsParams"):
        monkeypatch.setattr(vllm_generation, name, SimpleNamespace, raising=False)


@dataclass
class Script:
    """What the policy says after each context, cut where vLLM cuts: at the limit, at the window."""

    turns: Callable[[tuple[int, ...]], list[int]]
    asked: list[tuple[tuple[int, ...], dict[str, Any]]] = field(default_factory=list)
    """Contexts and settings, in the order in which they came."""

    def say(self, context: tuple[int, ...], settings: dict[str, Any], window: int = WINDOW) -> list[int]:
        self.asked.append((context, dict(settings)))
        return self.turns(context)[: min(settings["max_tokens"], window - len(context))]


class ScriptedLLM:
    """`vllm.LLM`: each step of its engine gives every request one token."""

    def __init__(self, script: Script, window: int = WINDOW) -> None:
        self.script, self.window = script, window
        self.log: list[str] = []
        self.running: dict[str, tuple[tuple[int, ...], list[int], int]] = {}
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=lambda _: self.log.append("load")))
        self.llm_engine = SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=window),
            model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner)),
            add_request=self.add_request,
            abort_request=self.abort_request,
            step=self.step,
        )

    def add_request(self, request_id: str, prompt: dict[str, Any], params: Any) -> None:
        context = tuple(prompt["prompt_token_ids"])
        assert request_id not in self.running and len(context) < self.window
        self.log.append(f"add {request_id}")
        self.running[request_id] = (context, self.script.say(context, vars(params), self.window), 0)

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.log.append(f"abort {request_id}")
            del self.running[request_id]

    def step(self) -> list[Any]:
        self.log.append("step")
        ended = []
        for name, (context, turn, said) in list(self.running.items()):
            self.running[name] = (context, turn, said + 1)
            if said + 1 == len(turn):
                del self.running[name]
                ended.append(_output(name, context, turn))
        return ended[::-1]

    def generate(self, prompts: Any, sampling_params: Any, use_tqdm: bool) -> list[Any]:
        """What TRL calls where it generates itself."""
        contexts = [tuple(prompt["prompt_token_ids"]) for prompt in prompts]
        return [
            _output(str(i), context, self.script.say(context, vars(sampling_params), self.window))
            for i, context in enumerate(contexts)
        ]

    def sleep(self, level: int) -> None:
        self.log.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.log.append(f"wake {tags[0]}")

    def reset_prefix_cache(self) -> None:
        assert not self.running, "vLLM refuses it while there are requests"
        self.log.append("forget")


def _output(name: str, context: tuple[int, ...], turn: list[int]) -> Any:
    """vLLM reports the most probable token beside the sampled one, where it is asked for more than that."""
    logprobs = [{-1: SimpleNamespace(logprob=-0.1, rank=1), t: SimpleNamespace(logprob=LOGPROB, rank=2)} for t in turn]
    completion = SimpleNamespace(token_ids=turn, logprobs=logprobs, finish_reason="stop")
    return SimpleNamespace(
        request_id=name, prompt_token_ids=list(context), outputs=[completion], num_cached_tokens=len(context) // 2
    )


def scripted_wrapper(mode: str, sleeps: bool = False, **more: Any) -> Any:
    """TRL's wrapper as its constructor leaves it."""
    wrapper: Any = object.__new__(VLLMGeneration)
    vars(wrapper).update(SETTINGS, mode=mode, max_completion_length=99, generation_kwargs={}, logprobs=0)
    vars(wrapper).update(structured_outputs_regex=None, tensor_parallel_size=1, enable_sleep_mode=sleeps)
    wrapper.accelerator = Accelerator(cpu=True)
    wrapper.model = torch.nn.Linear(1, 1)  # two parameters to send
    wrapper._dist = SimpleNamespace(is_fsdp=False, gather_params=lambda _: nullcontext())
    wrapper._llm_weights_sleeping = sleeps
    vars(wrapper).update(more)
    return wrapper


class ScriptedServer(ThreadingHTTPServer):
    """Answers as `vllm serve` does, unless a behaviour is due: then that, once."""

    daemon_threads = True
    request_queue_size = 128  # with 5, the 64 requests that an engine sends at once are sent again after seconds

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = script
        self.behaviours: list[Callable[[_Handler], None]] = []
        self.headers: list[Any] = []
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
        self.server.headers.append(self.headers)
        if self.server.behaviours:
            self.server.behaviours.pop(0)(self)
            return
        given = body["prompt"]
        contexts = given if isinstance(given[0], list) else [given]
        choices = [{"index": place, **self._turn(tuple(context), body)} for place, context in enumerate(contexts)]
        self.answer({"choices": choices[::-1]})  # nobody promises an order

    def _turn(self, context: tuple[int, ...], body: dict[str, Any]) -> dict[str, Any]:
        assert len(context) + body["max_tokens"] <= WINDOW, "vLLM answers 400"
        turn = self.server.script.say(context, body)
        logprobs = {"token_logprobs": [LOGPROB] * len(turn)}
        return {"token_ids": turn, "logprobs": logprobs, "finish_reason": "length"}

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
