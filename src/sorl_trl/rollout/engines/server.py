"""A client for a vLLM server over HTTP, with retries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import httpx2
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from sorl_trl.threads import DaemonThreads

AT_ONCE = 64
"""The most concurrent requests per rank: TRL's own number."""
ANSWER_S = 600.0
"""Time limit for an answer: a turn may be queued for long, then generate 4,096 tokens at 10 per second."""
# Few attempts, close together, bridge a broken connection. They must not outlast a restart, after which the server
# would have its first weights.
_ATTEMPTS, _WAIT_S = 4, 0.5
_CONNECT_S = 10.0
_EXCERPT = 400


class EngineUnavailable(RuntimeError):
    """The engine is gone or does not answer, so the rollout cannot continue."""


class _Passing(EngineUnavailable):
    """A failure after which another attempt may succeed."""


@dataclass(frozen=True)
class Sampled:
    """What vLLM sampled after a context."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None
    versions: tuple[int, int] | None = None
    """Versions of the weights when the turn was requested and when it was answered, if they can change in between."""
    routes: Any = field(default=None, compare=False, repr=False)
    """What vLLM reports of the tokens that it has read, for `Routers.of_vllm`."""


class VLLMServer:
    """A connection to a server, for several threads.

    A request is sent again if its connection fails or it gets HTTP 5xx. It contains its seed, so the second attempt
    samples what the first would have, and only one answer is used. Other errors are not retried.
    """

    def __init__(self, base_url: str, answer_s: float = ANSWER_S) -> None:
        self.threads = DaemonThreads(AT_ONCE, "sorl-vllm")
        """The threads that send requests."""
        self.version: int | None = None
        """The version of the server's weights, if they change while rollouts continue."""
        self._base_url = base_url
        self._answer_s = answer_s
        self._client = httpx2.Client(
            verify=base_url.startswith("https:"),  # plain HTTP needs no certificates, which take time to read
            timeout=httpx2.Timeout(answer_s, connect=_CONNECT_S),
            limits=httpx2.Limits(max_connections=AT_ONCE, max_keepalive_connections=AT_ONCE),
        )

    @cached_property
    def model(self) -> tuple[str, int]:
        """The name of the served model, and the number of tokens that it can read; requested once."""
        (model, *_) = self.ask("GET", "/v1/models")["data"]
        return str(model["id"]), int(model["max_model_len"])

    def close(self) -> None:
        """Send no more requests and ignore all answers."""
        self._client.close()

    def complete(self, context: Sequence[int], settings: Mapping[str, Any]) -> Sampled:
        """Sample after a context; `settings` are those of `/v1/completions`.

        Raises the errors of `ask`, and RuntimeError if the answer does not have vLLM's format.
        """
        requested = self.version
        body = {
            **settings,
            "model": self.model[0],
            "prompt": [list(context)],
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # JSON may not be able to hold a token's text
        }
        answer = self.ask("POST", "/v1/completions", body)
        versions = None if requested is None else (requested, self.version or 0)
        try:
            return _sampled(answer, versions)
        except (KeyError, TypeError, ValueError) as error:
            text = str(answer)[:_EXCERPT]
            raise RuntimeError(f"the server's answer is not in vLLM's format ({error!r}): {text}") from error

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request, and return the server's answer.

        Raises EngineUnavailable if it cannot be reached or does not answer in time, and RuntimeError with the server's
        message if it refuses.
        """
        retrying = Retrying(
            retry=retry_if_exception_type(_Passing),
            stop=stop_after_attempt(_ATTEMPTS),
            wait=wait_exponential(_WAIT_S),
            reraise=True,
        )
        return retrying(self._ask_once, method, f"{self._base_url}{path}", body)

    def _ask_once(self, method: str, url: str, body: Any) -> Any:
        if self._client.is_closed:
            raise EngineUnavailable(f"{url} is no longer queried: the run has ended")
        try:
            response = self._client.request(method, url, json=body)
        except (httpx2.ReadTimeout, httpx2.WriteTimeout) as error:
            # It may still be sampling, and a second request would double the work.
            raise EngineUnavailable(f"{url} did not answer within {self._answer_s:g} s") from error
        except httpx2.TransportError as error:
            raise _Passing(f"{url} cannot be reached: {error!r}") from error
        if response.is_server_error:
            raise _Passing(f"{url} answered HTTP {response.status_code}: {response.text[:_EXCERPT]}")
        if response.status_code != httpx2.codes.OK:
            raise RuntimeError(f"{url} refused with HTTP {response.status_code}: {response.text[:_EXCERPT]}")
        try:
            return response.json()
        except ValueError as error:
            raise RuntimeError(f"{url} did not answer in JSON: {response.text[:_EXCERPT]}") from error


def server_url(vllm_generation: Any) -> str:
    """The address of TRL's server."""
    vllm = vllm_generation
    return str(vllm.server_base_url or f"http://{vllm.server_host}:{vllm.server_port}")


def _sampled(answer: Mapping[str, Any], versions: tuple[int, int] | None) -> Sampled:
    (choice,) = answer["choices"]
    return Sampled(
        tuple(choice["token_ids"]),
        tuple(math.nan if each is None else each for each in choice["logprobs"]["token_logprobs"]),
        choice["finish_reason"],
        versions,
        choice.get("routed_experts"),
    )
