"""The policy on vLLM: how TRL's wrapper sends it, and how asynchronous rollouts check that it has arrived."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from accelerate.utils import broadcast_object_list, gather_object
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer
from trl.trainer.utils import pad

from sorl_trl.rollout import Engine, EngineOptions, TurnEnd
from sorl_trl.rollout.engines.server import EngineUnavailable, VLLMServer, server_url
from sorl_trl.rollout.engines.vllm import VLLMServerEngine
from sorl_trl.trainers.adapters import replaced
from sorl_trl.trainers.checkpoint import checkpoint_now
from sorl_trl.trainers.critic import is_critic_name
from sorl_trl.trainers.host import Host

TOLERANCE = 0.2
"""The largest mean difference of a probe, in nats. Rounding to bfloat16 stays below it; other weights exceed it
(`benchmarks/results/real_engines.md`)."""
_PROBE, _APART, _MOST = 32, 2, 0.5
"""How many prompt tokens a probe uses, by how many tokens its prefixes differ, and the cap on one token's difference,
since one in a thousand is off by more than a nat in bfloat16."""
_PLAIN = {"repetition_penalty": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs": 0, "ignore_eos": True}
"""Settings that make a server sample from the unmodified policy, whatever its own defaults are."""


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


Probe: TypeAlias = "list[tuple[list[int], int, float]]"
"""Contexts, the token that a server sampled after each, and its log-probability."""


class ServerPolicy:
    """The policy on a vLLM server. Turns in progress while its weights change continue with the new weights."""

    def __init__(self, host: Host) -> None:
        self._host, self._vllm = host, host.vllm
        self._server = VLLMServer(server_url(self._vllm))
        self._for_probes = VLLMServer(server_url(self._vllm))  # its requests do not queue behind those of rollouts
        host.unload_engine()  # an earlier run may have sent other weights in the same step

    def renew(self, version: int, prompt_ids: Sequence[int]) -> None:
        """Send the weights if they have changed, and verify with a probe of this prompt that they have arrived.

        Each turn from now on carries this `version`. All processes call it together, and all raise EngineUnavailable
        if the server is gone, or RuntimeError if it has other weights.
        """
        raise_on_all_ranks(self._host, self._send)  # no process relies on weights that are still under way
        is_main = self._host.accelerator.is_main_process
        probe = raise_on_all_ranks(self._host, lambda: self.probe(prompt_ids, version) if is_main else None)
        self.check(broadcast_object_list([probe])[0])
        self._server.version = version

    def _send(self) -> None:
        if self._host.is_loaded:
            return
        self._for_probes.ask("GET", "/weight_info")  # TRL's client would wait for a server that is gone
        try:
            self._host.load_engine()
        except Exception:
            self._for_probes.ask("GET", "/weight_info")
            raise

    def probe(self, prompt_ids: Sequence[int], seed: int) -> Probe:
        """Sample a token after each of several prefixes of the prompt, at the trainer's temperature.

        The server samples all of them in one step and answers at once, however many turns are in progress.
        """
        prompt = list(prompt_ids[: min(_PROBE, self._for_probes.model[1] - 1)])
        contexts = [prompt[:length] for length in range(1, len(prompt) + 1, _APART)]
        settings = _PLAIN | {"max_tokens": 1, "temperature": self._host.args.temperature, "seed": seed}
        turns = self._for_probes.complete(contexts, settings)
        if not all(turn.token_ids for turn in turns):
            reasons = sorted({str(turn.finish_reason) for turn in turns})
            raise RuntimeError(f"vLLM ended a probe of its weights without a token: finish_reason {reasons}")
        return [(context, turn.token_ids[0], turn.logprobs[0]) for context, turn in zip(contexts, turns, strict=True)]

    def check(self, probe: Probe) -> None:
        """Raise RuntimeError if a probe differs by more than `TOLERANCE`. All processes call it together."""
        difference = self.difference(probe)
        if not difference <= TOLERANCE:  # true for NaN, too
            raise RuntimeError(
                f"The vLLM server at {server_url(self._vllm)} does not have the trainer's weights: the "
                f"log-probabilities of a probe differ by {difference:.2g} on average, and {TOLERANCE} is allowed. "
                "Check that it serves the trainer's model and that weight updates reach it."
            )

    def difference(self, probe: Probe) -> float:
        """The mean absolute difference, in nats, between the probe's log-probabilities and the trainer's."""
        host, (contexts, token_ids, logprobs) = self._host, zip(*probe, strict=True)
        prompts = [torch.tensor(context, device=host.accelerator.device) for context in contexts]
        sampled = torch.tensor(token_ids, device=host.accelerator.device).unsqueeze(1)
        batch = {"prompt_ids": pad(prompts, 0, "left"), "completion_ids": sampled}
        batch["prompt_mask"] = pad([torch.ones_like(each) for each in prompts], 0, "left")
        batch["completion_mask"] = torch.ones_like(sampled)
        is_training = host.is_training
        host.model.eval()  # the server samples without dropout
        own = host.score(host.model, batch).logps[:, 0].float().cpu()
        host.model.train(is_training)
        return float((own - torch.tensor(logprobs)).abs().clamp(max=_MOST).nanmean())

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
        self._for_probes.close()


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
