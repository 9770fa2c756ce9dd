"""Engines around TRL's vLLM, colocated or as a server. Each turn is a separate request. See docs/how_to/scale.md."""

from __future__ import annotations

import hashlib
import queue
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from accelerate.utils import is_peft_model

from sorl_trl.rollout import Engine, Generation, TurnEnd, TurnRequest
from sorl_trl.rollout.engines.server import EngineUnavailable, Sampled, VLLMServer, server_url
from sorl_trl.rollout.engines.slots.support import base_model
from sorl_trl.rollout.routing import Routers

__all__ = ["EngineUnavailable", "VLLMColocateEngine", "VLLMEngine", "VLLMServerEngine", "vllm_engine"]

Answers: TypeAlias = "queue.SimpleQueue[tuple[Submitted, Future[Sampled]] | None]"
_COMPLETE = ("stop", "length")


@dataclass(frozen=True)
class Submitted:
    """A turn of one row, as vLLM is asked for it."""

    row: int
    turn: int
    """How many turns the row has begun before it in this rollout."""
    context_ids: tuple[int, ...]
    stops: tuple[str, ...]
    settings: Mapping[str, Any]
    """How to sample it, under names that both `SamplingParams` and the server use."""


class VLLMEngine(Engine):
    """Base of the engines around TRL's `VLLMGeneration`.

    A turn ends where `HFGenerator` would end it: vLLM stops at the same end-of-sequence tokens and no others, and
    keeps special tokens in the text in which it looks for stop strings. Each turn is seeded from the rollout's base
    seed, its row and its number, so rows do not affect each other's samples.

    A schema replaces the trainer's `structured_outputs_regex` for its turn.
    """

    window: int
    constrains = True

    def __init__(self, vllm_generation: Any, end: TurnEnd, window: int) -> None:
        self.window = window
        self._vllm = vllm_generation
        self._end = end
        self._settings = sampling_settings(vllm_generation, end)
        self._base_seed = 0
        self._turns: Counter[int] = Counter()
        self._generating: dict[int, Submitted] = {}
        self._routers: Routers | None = None

    def report_routes(self) -> None:
        self._routers = Routers(base_model(self._vllm.model))

    def open(self, rows: int) -> None:
        self._base_seed = self.rollout_seed()
        self._turns = Counter()
        self._generating = {}

    def release(self, row: int) -> None:
        self._generating.pop(row, None)

    @property
    def idle(self) -> bool:
        return not self._generating

    def submit(self, request: TurnRequest) -> None:
        row, turn = request.row, self._turns[request.row]
        self._turns[row] += 1
        settings = self._settings | {
            "max_tokens": min(request.limit, self.window - len(request.token_ids)),
            "seed": turn_seed(self._base_seed, row, turn),
            "stop": [*self._settings["stop"], *request.stops],
        }
        if request.schema is not None:
            settings["structured_outputs"] = {"json": dict(request.schema)}
        submitted = Submitted(row, turn, tuple(request.token_ids), tuple(request.stops), settings)
        self._generating[row] = submitted
        self._send(submitted)

    @abstractmethod
    def _send(self, request: Submitted) -> None:
        """Have vLLM generate a turn."""

    def _awaits(self, request: Submitted) -> bool:
        """Whether the turn is still wanted: its row has not been released, and the rollout has not ended."""
        return self._generating.get(request.row) is request

    def _finish(self, request: Submitted, sampled: Sampled) -> tuple[int, Generation]:
        """The turn of a request. Raises RuntimeError if vLLM aborted it."""
        if sampled.finish_reason not in _COMPLETE:
            raise RuntimeError(
                f"vLLM ended turn {request.turn} of row {request.row} after {len(sampled.token_ids)} tokens with "
                f"finish_reason={sampled.finish_reason!r}, which must be one of {_COMPLETE}"
            )
        del self._generating[request.row]
        (stopped,) = self._end.reached([sampled.token_ids], [request.stops])
        routes = None if self._routers is None else self._routers.of_vllm(sampled.routes)
        return request.row, Generation(sampled.token_ids, sampled.logprobs, stopped, sampled.versions, routes)


class VLLMColocateEngine(VLLMEngine):
    """Samples with the engine that TRL's `VLLMGeneration` runs in this process, one engine step per poll.

    With sleep mode, a rollout wakes the engine and sends it the weights when it opens, and puts it to sleep when it
    closes. TRL's own `generate` does this at every call and thus loses the cache of earlier turns.

    Closing aborts unfinished requests, because TRL's `generate` would continue them, and vLLM does not reset its cache
    while it has requests.

    With tensor parallelism, a group of ranks shares one engine: `polls_together` is True, and each poll first
    exchanges the requests of all ranks, so that all add the same ones in the same order. Output for a released row is
    ignored.
    """

    def __init__(self, vllm_generation: Any, end: TurnEnd) -> None:
        super().__init__(vllm_generation, end, int(vllm_generation.llm.llm_engine.model_config.max_model_len))
        self._rank = vllm_generation.accelerator.process_index
        self.polls_together = vllm_generation.tensor_parallel_size > 1
        self._submitted: dict[str, Submitted] = {}
        """The requests of this rank since the last poll, by name."""
        self._running: dict[str, Submitted] = {}
        """The requests of all ranks that vLLM is processing, in order of arrival."""
        self._is_awake = False

    def open(self, rows: int) -> None:
        super().open(rows)
        self._submitted, self._running = {}, {}
        vllm = self._vllm
        if vllm.enable_sleep_mode:
            if vllm._llm_weights_sleeping:
                vllm.sync_weights()
            vllm.llm.wake_up(tags=["kv_cache"])
            self._is_awake = True
        if self.polls_together and is_peft_model(vllm.model):
            # As TRL does before it generates: vLLM's collectives can hang beside those of a LoRA step.
            vllm.accelerator.wait_for_everyone()

    def _send(self, request: Submitted) -> None:
        self._submitted[f"sorl-{self._rank}-{request.row}-{request.turn}"] = request

    def poll(self) -> list[tuple[int, Generation]]:
        engine = self._vllm.llm.llm_engine
        for name, request in self._exchanged().items():
            self._running[name] = request
            prompt = {"prompt_token_ids": list(request.context_ids)}
            engine.add_request(name, prompt, sampling_params(request.settings))
        if not self._running:
            return []
        ended = [(self._running.pop(output.request_id), output) for output in engine.step()]
        finished = [self._finish(request, _sampled(output)) for request, output in ended if self._awaits(request)]
        return sorted(finished, key=lambda each: each[0])

    def close(self) -> None:
        llm = self._vllm.llm
        if self._running:
            llm.llm_engine.abort_request(list(self._running))
            # vLLM counts a block as cached once it is planned, but a failed step has not computed it.
            llm.reset_prefix_cache()
        self._running, self._generating = {}, {}
        if self._is_awake:
            self._is_awake = False
            llm.sleep(level=2)
            self._vllm._llm_weights_sleeping = True

    def _exchanged(self) -> dict[str, Submitted]:
        """The new requests of all ranks of the group, ordered by rank."""
        own = {name: each for name, each in self._submitted.items() if self._awaits(each)}
        self._submitted = {}
        if not self.polls_together:
            return own
        gathered: list[Any] = [None] * self._vllm.tensor_parallel_size
        torch.distributed.all_gather_object(gathered, own, group=self._vllm.tp_group)
        everyone = {name: each for requests in gathered for name, each in requests.items()}
        return everyone | own  # instead of copies, which no row awaits


class VLLMServerEngine(VLLMEngine):
    """Sends each turn to `/v1/completions` of the server that TRL synchronizes, with up to 64 requests at a time.

    `poll` waits for the next turns to end. Ranks do not wait for each other, but each must reach the server. Several
    engines may share the connection to one server. Output for a released row is ignored.

    Raises:
        EngineUnavailable: The server is gone or hangs; also raised by `poll`.
        RuntimeError: The server refuses a request, with its message; also raised by `poll`.
    """

    in_steps = False

    def __init__(self, vllm_generation: Any, end: TurnEnd, server: VLLMServer) -> None:
        super().__init__(vllm_generation, end, window=server.model[1])
        self._server = server
        self._answers: Answers = queue.SimpleQueue()
        """The answers received so far. None wakes the thread that waits for one."""

    def open(self, rows: int) -> None:
        super().open(rows)
        self._answers = queue.SimpleQueue()

    def _send(self, request: Submitted) -> None:
        answers = self._answers
        future = self._server.threads.submit(self._answer, request)
        future.add_done_callback(lambda done: answers.put((request, done)))

    def poll(self) -> list[tuple[int, Generation]]:
        taken = [] if self.idle else [self._answers.get()]
        while not self._answers.empty():
            taken.append(self._answers.get())
        answered = [each for each in taken if each is not None and self._awaits(each[0])]
        finished = [self._finish(request, answer.result()) for request, answer in answered]
        return sorted(finished, key=lambda ended: ended[0])

    def wake(self) -> None:
        self._answers.put(None)

    def close(self) -> None:
        """Close without waiting: later answers are ignored, and requests not yet sent are dropped."""
        self._generating, self._answers = {}, queue.SimpleQueue()

    def _answer(self, request: Submitted) -> Sampled:
        if not self._awaits(request):
            raise CancelledError("the turn is no longer needed")
        return self._server.complete(request.context_ids, request.settings)


def vllm_engine(vllm_generation: Any, end: TurnEnd) -> VLLMEngine:
    """The engine around TRL's `VLLMGeneration`, in either mode.

    All ranks call it together, once per rollout, after the weights have been synchronized. Raises the errors of the
    engines.
    """
    if vllm_generation.mode == "server":
        vllm_generation.accelerator.wait_for_everyone()  # until the main process has sent the weights
        if not hasattr(vllm_generation, "turn_server"):  # all rollouts share it and its connections
            vllm_generation.turn_server = VLLMServer(server_url(vllm_generation))
        return VLLMServerEngine(vllm_generation, end, vllm_generation.turn_server)
    return VLLMColocateEngine(vllm_generation, end)


def turn_seed(base: int, row: int, turn: int) -> int:
    """A seed that fits torch's generators and the server's JSON; never -1, which vLLM takes for no seed."""
    digest = hashlib.blake2b(f"{base} {row} {turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def sampling_settings(vllm_generation: Any, end: TurnEnd) -> dict[str, Any]:
    """The sampling settings of every turn.

    They combine the trainer's settings, as TRL reads them, with this package's turn ends and output options.
    """
    vllm = vllm_generation
    settings: dict[str, Any] = {
        "repetition_penalty": vllm.repetition_penalty,
        "temperature": vllm.temperature,
        "top_p": vllm.top_p,
        "top_k": vllm.top_k,
        "min_p": 0.0 if vllm.min_p is None else vllm.min_p,
        **(vllm.generation_kwargs or {}),
    }
    if vllm.structured_outputs_regex is not None:
        settings["structured_outputs"] = {"regex": vllm.structured_outputs_regex}
    return settings | {
        "n": 1,
        "logprobs": 0,  # only the sampled token's
        "stop": list(end.stop_strings),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "stop_token_ids": list(end.eos_token_ids),
        "ignore_eos": True,  # vLLM's own end-of-sequence tokens, in favour of the line above
    }


def sampling_params(settings: Mapping[str, Any]) -> Any:
    """Make vLLM's own type from the settings of a turn."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    own = {**settings}
    if isinstance(described := own.get("structured_outputs"), dict):
        own["structured_outputs"] = StructuredOutputsParams(**described)
    return SamplingParams(**own, output_kind=RequestOutputKind.FINAL_ONLY)


def _sampled(output: Any) -> Sampled:
    (completion,) = output.outputs
    token_ids = tuple(completion.token_ids)
    logprobs = (choices[token].logprob for choices, token in zip(completion.logprobs, token_ids, strict=True))
    routes = getattr(completion, "routed_experts", None)
    return Sampled(token_ids, tuple(logprobs), completion.finish_reason, routes=routes)
