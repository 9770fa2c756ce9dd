"""The policies that sample ahead of training: a vLLM server, or copies of the policy in this process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import nn

from sorl_trl.agents.chat import RolloutSetup
from sorl_trl.agents.vllm.connection import EngineUnavailable, VLLMServer
from sorl_trl.agents.vllm.server import VLLMServerEngine, sampled_turns, server_url
from sorl_trl.rollout import Engine, EngineOptions, TurnEnd, model_engine
from sorl_trl.rollout.slots import SlotEngine
from sorl_trl.trainers.checkpoint import checkpoint_now

TOLERANCE = 0.2
"""The largest mean difference of a probe, in nats. Rounding to bfloat16 causes less, and other weights more:
`benchmarks/results/real_engines.md` has both for a language model."""
_PROBE, _PROBED_TOKENS, _MOST = 32, 16, 0.5
"""How many tokens of the prompt a probe uses, after how many of its beginnings the server samples a token, and the
most that one token counts: in bfloat16, one in a thousand is off by more than a nat."""
_PLAIN = {"repetition_penalty": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs": 0, "ignore_eos": True}
"""Settings that make a server sample from the policy as it is, whatever its own defaults are."""


@dataclass(frozen=True)
class Probe:
    """Tokens that a server has sampled, one after each of several beginnings of the `context`, of these `lengths`."""

    context: list[int]
    lengths: list[int]
    token_ids: list[int]
    logprobs: list[float]


class ServerPolicy:
    """The policy on a vLLM server. Turns under way while its weights change continue with the new weights."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._vllm = trainer, trainer.vllm_generation
        self._server = VLLMServer(server_url(self._vllm))
        self._for_probes = VLLMServer(server_url(self._vllm))  # its requests do not queue behind those of rollouts
        trainer._last_loaded_step = -1  # send the weights, whatever an earlier run has sent

    def renew(self, version: int, setup: RolloutSetup, prompts: list[Any]) -> None:
        """Send the weights if they have changed, and check by a probe after one of the prompts that they are there.

        Each turn from now on is stamped with the `version`. All processes call it together, and all raise
        EngineUnavailable if the server is gone, and RuntimeError if it has other weights.
        """
        together(self._trainer, self._send)  # no process relies on weights that are still under way
        is_main = self._trainer.accelerator.is_main_process
        probe = together(self._trainer, lambda: self.probe(setup.encode(prompts[:1])[0], version) if is_main else None)
        self.check(broadcast_object_list([probe])[0])
        self._server.version = version

    def _send(self) -> None:
        trainer = self._trainer
        if trainer.state.global_step == trainer._last_loaded_step:
            return
        self._for_probes.ask("GET", "/weight_info")  # TRL's client would wait for a server that is gone
        try:
            self._vllm.sync_weights()
        except Exception:
            self._for_probes.ask("GET", "/weight_info")
            raise
        trainer._last_loaded_step = trainer.state.global_step

    def probe(self, prompt_ids: Sequence[int], seed: int) -> Probe:
        """Sample a token after each beginning of the prompt, at the trainer's temperature.

        The server samples all of them in one step and answers at once, however many turns are under way.
        """
        model, window = self._for_probes.model
        context = list(prompt_ids[: min(_PROBE, window - 1)])
        count = min(len(context), _PROBED_TOKENS)
        lengths = [len(context) * number // count for number in range(1, count + 1)]
        body = {
            **{**_PLAIN, "model": model, "max_tokens": 1, "temperature": self._trainer.temperature, "seed": seed},
            "prompt": [context[:length] for length in lengths],
            **{"return_token_ids": True, "return_tokens_as_token_ids": True},
        }
        turns = sampled_turns(self._for_probes.ask("POST", "/v1/completions", body), of=count)
        if not all(turn.token_ids for turn in turns):
            reasons = sorted({str(turn.finish_reason) for turn in turns})
            raise RuntimeError(f"vLLM ended a probe of its weights without a token: finish_reason {reasons}")
        return Probe(context, lengths, [turn.token_ids[0] for turn in turns], [turn.logprobs[0] for turn in turns])

    def check(self, probe: Probe) -> None:
        """Raise RuntimeError if a probe differs by more than `TOLERANCE`. All processes call it together."""
        difference = self.difference(probe)
        if not difference <= TOLERANCE:  # true for NaN, too
            raise RuntimeError(
                f"The vLLM server at {server_url(self._vllm)} samples from other weights than the trainer's: the "
                f"log-probabilities of a probe differ by {difference:.2g} on average, and {TOLERANCE} is allowed. Was "
                "it started with another model, or did an update not arrive?"
            )

    def difference(self, probe: Probe) -> float:
        """The mean absolute difference, in nats, between the probe's log-probabilities and the trainer's."""
        trainer = self._trainer
        ids = torch.tensor([probe.context], device=trainer.accelerator.device)
        after = [length - 1 for length in probe.lengths]
        sampled = torch.full_like(ids, -100)
        sampled[0, after] = torch.tensor(probe.token_ids, device=ids.device)
        is_training = trainer.model.training
        trainer.model.eval()  # the server samples without dropout
        # Use the head that training uses: ZeRO-3 fails if the first pass goes through other modules.
        with torch.no_grad(), trainer.accelerator.autocast():
            options = {"attention_mask": torch.ones_like(ids), "shift_labels": sampled, "fused_lm_head": True}
            output = trainer.model(input_ids=ids, **options)
        trainer.model.train(is_training)
        differences = (output.log_probs[0, after].float().cpu() - torch.tensor(probe.logprobs)).abs()
        return differences.clamp(max=_MOST).nanmean().item()

    def engine(self, end: TurnEnd, options: EngineOptions) -> Engine:
        """Make an engine for a rollout that begins now."""
        return VLLMServerEngine(self._vllm, end, self._server)

    def close(self) -> None:
        """Abort the requests under way."""
        self._server.close()
        self._for_probes.close()


class PolicyCopies:
    """Copies of the policy in this process, one for each version in use, for tests and small models.

    A rollout samples from the weights with which it began. Sampling shares the cores, or the GPU, with training.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._fresh: nn.Module | None = None
        """The copy with the present weights, once a rollout has needed it. Engines hold the older copies."""

    def renew(self, version: int, setup: RolloutSetup, prompts: list[Any]) -> None:
        """Forget the copy, because the policy has new weights."""
        self._fresh = None

    def engine(self, end: TurnEnd, options: EngineOptions) -> Engine:
        """Make an engine for a rollout that begins now and samples from the present weights."""
        if self._fresh is None:
            policy = self._trainer.accelerator.unwrap_model(self._trainer.model)
            self._fresh = copy.deepcopy(policy).eval().requires_grad_(False)
            for module in self._fresh.modules():
                # TRL's and accelerate's wrappers of `forward` would call the original model.
                module.__dict__.pop("forward", None)
        engine = model_engine(self._fresh, end, self._trainer.generation_config, "slots", options.kv_cache_gib)
        assert isinstance(engine, SlotEngine)  # "slots" refuses a model that it does not serve
        engine.logprobs_at = self._trainer.temperature  # those that the trainer computes
        return engine

    def close(self) -> None:
        """Abort nothing: rollouts end with their next step."""


Policy: TypeAlias = ServerPolicy | PolicyCopies


def together(trainer: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on all processes, and raise an error on all if any of them raises one.

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
        folder = checkpoint_now(trainer) or "the last checkpoint, where there is one"
        raise EngineUnavailable(f"{failures[0][1]}. Resume from {folder}.") from error
    if error is not None:
        raise error
    if failures:
        raise RuntimeError(f"another process failed: {failures[0][1]}")
    return result
