"""The policy on vLLM: how TRL's wrapper sends it, and how asynchronous rollouts sample from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.utils import gather_object
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from sorl_trl.rollout import Engine, EngineOptions, TurnEnd
from sorl_trl.rollout.engines.server import EngineUnavailable, VLLMServer, server_url
from sorl_trl.rollout.engines.vllm import VLLMServerEngine
from sorl_trl.trainers.checkpoint import checkpoint_now
from sorl_trl.trainers.critic import is_critic_name, replaced
from sorl_trl.trainers.host import Host


class WeightClient(VLLMClient):
    """Pauses the server while its weights change, so that turns in progress continue with the new weights.

    vLLM's pause keeps these turns, and drops what they and the prefix cache computed with the old weights. The
    server's `/weight_info` counts the updates, so a restarted server is detected.
    """

    version = 0
    """The number of updates that this client has sent to the server."""

    def update_named_params(
        self, metadata: Sequence[tuple[str, str, list[int]]], named_params: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        try:
            self._check_version()
            try:
                self._post(f"{self.base_url}/pause", params={"mode": "keep"})
                super().update_named_params(metadata, named_params)
            finally:
                self._post(f"{self.base_url}/resume")
        except Exception:
            for _ in named_params:  # take part while other processes gather the rest of sharded parameters
                pass
            raise

    def _check_version(self) -> None:
        """Raise EngineUnavailable if the server does not have the weights that it was last sent."""
        if self.version and (has := self._get(f"{self.base_url}/weight_info")["weight_version"]) != str(self.version):
            raise EngineUnavailable(
                f"The vLLM server at {self.base_url} has weights version {has!r}, but was last sent '{self.version}': "
                "it was restarted, or another trainer uses it"
            )

    def _finish_weight_update(self) -> None:
        self.version += 1
        self._post(f"{self.base_url}/finish_weight_update", json={"weight_version": str(self.version)})

    def reset_prefix_cache(self) -> None:
        """Nothing to do: the pause has reset it, and nothing else could while turns are in progress."""


class PolicyGeneration(VLLMGeneration):
    """TRL's `VLLMGeneration`, except that vLLM gets no critic, and a server is reached through a `WeightClient`."""

    def _init_vllm(self) -> None:
        if self.mode != "server":
            super()._init_vllm()
        elif self.accelerator.is_main_process:
            self.vllm_client = WeightClient(
                server_url(self), group_port=self.group_port, connection_timeout=self.server_timeout
            )
            self.vllm_client.init_communicator(device=self.accelerator.device)

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, value) for name, value in super()._iter_named_params() if not is_critic_name(name))


@contextmanager
def used_by_trl(routes: bool = False) -> Iterator[None]:
    """Context in which TRL's trainer constructor makes a `PolicyGeneration`; colocated vLLM may report `routes`.

    TRL looks the classes up in its modules, and the object connects to a server at once, so there is nothing to pass
    or override.
    """
    of_vllm = [vllm_generation] if routes and hasattr(vllm_generation, "LLM") else []
    with (
        replaced([grpo_trainer], VLLMGeneration=lambda _: PolicyGeneration),
        replaced(of_vllm, LLM=lambda llm: partial(llm, enable_return_routed_experts=True)),
    ):
        yield


class ServerPolicy:
    """The policy on a vLLM server. Turns in progress while its weights change continue with the new weights."""

    def __init__(self, host: Host) -> None:
        self._host, self._vllm = host, host.vllm
        self._server = VLLMServer(server_url(self._vllm))
        self._control = VLLMServer(server_url(self._vllm))  # its requests do not queue behind those of rollouts
        host.unload_engine()  # an earlier run may have sent other weights in the same step

    def renew(self, version: int) -> None:
        """Send the weights if they have changed. Each turn from now on carries this `version`.

        All processes call it together, and all raise EngineUnavailable if the server is gone or was restarted.
        """
        raise_on_all_ranks(self._host, self._send)  # no process relies on weights that are still under way
        self._server.version = version

    def _send(self) -> None:
        if self._host.is_loaded:
            return
        self._control.ask("GET", "/weight_info")  # TRL's client would wait for a server that is gone
        try:
            self._host.load_engine()
        except Exception:
            self._control.ask("GET", "/weight_info")
            raise

    def engine(self, end: TurnEnd, options: EngineOptions) -> Engine:
        """Make an engine for a rollout that begins now.

        It follows no schema: constrained sampling would change the log-probabilities that ratios compare with.
        """
        engine = VLLMServerEngine(self._vllm, end, self._server)
        engine.constrains = False
        return engine

    def close(self) -> None:
        """Abort the requests in progress."""
        self._server.close()
        self._control.close()


def raise_on_all_ranks(host: Host, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on all processes, and raise an error on all of them if any raises one.

    If the only failure is that the engine is gone, a checkpoint is written before EngineUnavailable is raised. Call
    this before any work of the next rollout.
    """
    result, error, failure = None, None, None
    try:
        result = function(*args)
    except Exception as raised:
        error, failure = raised, (isinstance(raised, EngineUnavailable), str(raised) or repr(raised))
    failures = [each for each in gather_object([failure]) if each is not None]
    if failures and all(is_gone for is_gone, _ in failures):
        folder = checkpoint_now(host) or "the last checkpoint, if there is one"
        raise EngineUnavailable(f"{failures[0][1]}. Resume from {folder}.") from error
    if error is not None:
        raise error
    if failures:
        raise RuntimeError(f"another process failed: {failures[0][1]}")
    return result
