"""What samples ahead of training: a vLLM server, or copies of the policy in this process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from trl import GRPOTrainer

from sorl_trl.rollout import Engine, EngineOptions, Generation, TurnEnd, generate_turns, model_engine
from sorl_trl.rollout.slots import SlotEngine
from sorl_trl.trainers.agents.vllm.connection import VLLMServer
from sorl_trl.trainers.agents.vllm.server import VLLMServerEngine, server_url
from sorl_trl.trainers.agents.vllm.turns import turn_settings

TOLERANCE = 0.1
"""Nats, on average: a server in float32 is off by 1e-5, one in bfloat16 by .01."""
_PROBE, _PROBED_TOKENS, _MOST = 64, 16, 0.5
"""Tokens of the prompt, tokens that are sampled after them, and what one of these counts at the most: in bfloat16 one
in a thousand is off by more than a nat."""


_PLAIN = {"repetition_penalty": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""With which a policy samples what it says: of all options its temperature alone."""


class ServerPolicy:
    """The policy as a vLLM server has it. Turns that it is generating while its weights change go on with the new."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._vllm = trainer, trainer.vllm_generation
        self._server = VLLMServer(server_url(self._vllm))
        self._for_probes = VLLMServer(server_url(self._vllm))  # whose requests do not queue behind those of rollouts

    def begin(self, version: int) -> None:
        """From now on it has the weights of this version; each turn is stamped with what it was sampled from."""
        self._server.version = version

    def send(self) -> None:
        """Send the weights. Raise EngineUnavailable where the server is gone, for whom TRL's client would wait."""
        self._reach()
        try:
            self._vllm.sync_weights()
        except Exception:
            self._reach()
            raise

    def _reach(self) -> None:
        self._for_probes.ask("GET", "/weight_info")

    def probe(self, prompt_ids: Sequence[int], seed: int) -> tuple[list[int], Generation]:
        """The beginning of a prompt, and what the server samples after it, at the trainer's temperature alone."""
        end = TurnEnd(self._trainer._tokenizer, (), self._trainer.eos_token_ids)
        engine = VLLMServerEngine(self._vllm, end, self._for_probes)
        engine.settings = {**_PLAIN, "temperature": self._trainer.temperature, **turn_settings(end)}
        engine.seed = seed
        engine.open(1)
        context = list(prompt_ids[: min(_PROBE, engine.window - _PROBED_TOKENS)])
        return context, generate_turns(engine, [context], [_PROBED_TOKENS])[0]

    def check(self, context: Sequence[int], sampled: Generation) -> None:
        """Raise RuntimeError where a probe was sampled from other weights than the trainer's.

        That is where its log-probabilities differ by more than `TOLERANCE` on average. All processes ask together.
        """
        trainer = self._trainer
        ids = torch.tensor([[*context, *sampled.token_ids]], device=trainer.accelerator.device)
        is_training = trainer.model.training
        trainer.model.eval()  # what is sampled is sampled without dropout
        with torch.no_grad():
            logps, _, _ = GRPOTrainer._get_per_token_logps_and_entropies(  # ours would take it for a rollout
                trainer, trainer.model, ids, torch.ones_like(ids), len(sampled.token_ids)
            )
        trainer.model.train(is_training)
        differences = (logps[0].float().cpu() - torch.tensor(sampled.logprobs)).abs()
        difference = differences.clamp(max=_MOST).nanmean().item()
        if difference > TOLERANCE:
            raise RuntimeError(
                f"The vLLM server at {server_url(self._vllm)} samples from other weights than the trainer's: the "
                f"log-probabilities of a probe differ by {difference:.2g} on average, and {TOLERANCE} is allowed. Was "
                "it started with another model, or did an update not arrive?"
            )

    def engine(self, end: TurnEnd, options: EngineOptions) -> Engine:
        """For a rollout that begins now."""
        return VLLMServerEngine(self._vllm, end, self._server)

    def close(self) -> None:
        """Cut what is under way."""
        self._server.close()
        self._for_probes.close()


class PolicyCopies:
    """Copies of the policy in this process, for tests and small models: one for each version that is sampled from.

    A rollout samples from the weights with which it began. Computing shares the cores, or the GPU, with training.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._fresh: nn.Module | None = None
        """The copy with the present weights, once a rollout has asked for it. Engines hold the others."""

    def begin(self, version: int) -> None:
        """The policy has new weights."""
        self._fresh = None

    def engine(self, end: TurnEnd, options: EngineOptions) -> Engine:
        """For a rollout that begins now, and samples from the present weights."""
        if self._fresh is None:
            self._fresh = _copied(self._trainer.accelerator.unwrap_model(self._trainer.model))
        engine = model_engine(self._fresh, end, self._trainer.generation_config, "slots", options.kv_cache_gib)
        assert isinstance(engine, SlotEngine)  # a model that slots do not serve is refused
        engine.gives_logprobs = True
        return engine

    def close(self) -> None:
        """Nothing to cut: rollouts end with their next step."""


def _copied(policy: nn.Module) -> nn.Module:
    model = copy.deepcopy(policy).eval().requires_grad_(False)
    for module in model.modules():
        # What TRL and accelerate have put over `forward` calls the original.
        module.__dict__.pop("forward", None)
    return model
