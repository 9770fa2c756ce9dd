"""vLLM as a server: every turn is a separate request, and every rank sends its own."""

from __future__ import annotations

import math
import queue
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import Any, TypeAlias

from sorl_trl.agents.vllm.connection import VLLMServer
from sorl_trl.agents.vllm.turns import Sampled, TurnRequest, VLLMEngine, sampling_settings
from sorl_trl.rollout import Generation, TurnEnd

Answers: TypeAlias = "queue.SimpleQueue[tuple[TurnRequest, Future[Sampled]] | None]"


class VLLMServerEngine(VLLMEngine):
    """Sends each turn to `/v1/completions` of the server that TRL synchronizes, up to 64 at a time.

    `poll` waits for the next turns to end. Ranks do not wait for each other, but each must reach the server. The
    server's steps are not counted. A server does not report its cache hits (unless started with
    `--enable-prompt-tokens-details`), so whole contexts count as prefilled.

    Several engines may share the connection to one server.

    Raises:
        EngineUnavailable: The server is gone or hangs; also raised by `poll`.
        RuntimeError: The server refuses a request, with its message; also raised by `poll`.
    """

    in_steps = False

    def __init__(self, vllm_generation: Any, end: TurnEnd, server: VLLMServer) -> None:
        self._server = server
        self._model, window = server.model
        super().__init__(end, window)
        self._settings = sampling_settings(vllm_generation, end)
        self._asked = 0
        """How many requests have an answer that no poll has taken yet."""
        self._answers: Answers = queue.SimpleQueue()
        """The answers that have come back. None wakes the thread that waits for one."""

    def open(self, rows: int) -> None:
        super().open(rows)
        self._asked, self._answers = 0, queue.SimpleQueue()

    def submit(self, row: int, context_ids: Sequence[int], limit: int) -> None:
        request = self._begin(row, context_ids, limit)
        self._asked += 1
        answers = self._answers
        future = self._server.threads.submit(self._answer, request, answers)
        future.add_done_callback(lambda done: answers.put((request, done)))

    def poll(self) -> list[tuple[int, Generation]]:
        there = [self._answers.get()] if self._asked else []
        while not self._answers.empty():
            there.append(self._answers.get())
        answered = [each for each in there if each is not None]
        self._asked -= len(answered)
        finished = [self._finish(request, answer.result()) for request, answer in answered]
        return sorted((each for each in finished if each is not None), key=lambda ended: ended[0])

    def release(self, row: int) -> None:
        self._generating.pop(row, None)

    def wake(self) -> None:
        self._answers.put(None)

    def close(self) -> None:
        """Wait for nothing: answers still to come are ignored, and requests not yet sent never are."""
        self._generating, self._answers = {}, queue.SimpleQueue()

    def _answer(self, request: TurnRequest, answers: Answers) -> Sampled:
        if answers is not self._answers:
            raise CancelledError("nobody waits for it any more")
        asked = self._server.version
        body = {
            **self._settings,
            "model": self._model,
            "prompt": list(request.context_ids),
            "max_tokens": request.limit,
            "seed": request.seed,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # JSON may not be able to hold a token's text
        }
        (sampled,) = sampled_turns(self._server.ask("POST", "/v1/completions", body), of=1)
        return replace(sampled, versions=None if asked is None else (asked, int(self._server.version or 0)))


def server_url(vllm_generation: Any) -> str:
    """The address of TRL's server."""
    vllm = vllm_generation
    return str(vllm.server_base_url or f"http://{vllm.server_host}:{vllm.server_port}")


def sampled_turns(answer: Mapping[str, Any], of: int) -> list[Sampled]:
    """The turns in an answer of `/v1/completions` to `of` prompts, in their order.

    Raises RuntimeError if the answer does not have vLLM's form.
    """
    try:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if len(choices) != of:
            raise ValueError(f"{len(choices)} choices instead of {of}")
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        return [
            Sampled(
                tuple(choice["token_ids"]),
                tuple(math.nan if each is None else each for each in choice["logprobs"]["token_logprobs"]),
                choice["finish_reason"],
                details.get("cached_tokens") or 0,
            )
            for choice in choices
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise RuntimeError(f"the server's answer is not one of vLLM's ({error!r}): {str(answer)[:400]}") from error
