"""What samples ahead of training: a vLLM server, or copies of the policy in this process."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import nn
from trl import GRPOTrainer

from sorl_trl.rollout import Engine, EngineOptions, TurnEnd, generate_turns, model_engine
from sorl_trl.rollout.slots import SlotEngine
from sorl_trl.trainers.agents.vllm.connection import VLLMServer
from sorl_trl.trainers.agents.vllm.server import VLLMServerEngine, server_url

TOLERANCE = 0.1
"""Nats, on average: a server in float32 is off by 1e-5, one in bfloat16 by .01."""
_PROBED_TOKENS = 8


class ServerPolicy:
    """The policy as a vLLM server has it. Turns that it is generating while its weights change go on with the new."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._vllm = trainer, trainer.vllm_generation
        self._server = VLLMServer(server_url(self._vllm))

    def begin(self, version: int, prompt_ids: Sequence[int]) -> None:
        """From now on it has the weights of this version; each turn is stamped with what it was sampled from.

        Raises RuntimeError where it samples from others: where the log-probabilities that it says of a few tokens
        after a prompt differ from the trainer's by more than `TOLERANCE` on average. All processes ask together.
        """
        self._server.version = version
        trainer, accelerator = self._trainer, self._trainer.accelerator
        sampled: list[Any] = [None]
        if accelerator.is_main_process:
            engine = self.engine(TurnEnd(trainer._tokenizer, (), trainer.eos_token_ids), EngineOptions())
            engine.seed = version
            engine.open(1)
            sampled = generate_turns(engine, [prompt_ids], [_PROBED_TOKENS])
        (probe,) = broadcast_object_list(sampled)
        ids = torch.tensor([[*prompt_ids, *probe.token_ids]], device=accelerator.device)
        with torch.no_grad():
            logps, _, _ = GRPOTrainer._get_per_token_logps_and_entropies(  # ours would take it for a rollout
                trainer, trainer.model, ids, torch.ones_like(ids), len(probe.token_ids)
            )
        difference = (logps[0].float().cpu() - torch.tensor(probe.logprobs)).abs().nanmean().item()
        if difference > TOLERANCE:
            raise RuntimeError(
                f"The vLLM server at {server_url(self._vllm)} samples from other weights than the trainer's: the "
                f"log-probabilities of a probe differ by {difference:.2g} on average, and {TOLERANCE} is allowed. Was "
                "it started with another model, or did an update not arrive?"
            )

    def engine(self, end: TurnEnd, options: EngineOptions) -> Engine:
        """For a rollout that begins now."""
        return VLLMServerEngine(self._vllm, end, self._server)

    def finish(self, engine: Engine) -> None:
        """The rollout of an engine has been taken."""

    def close(self) -> None:
        """Cut what is under way."""
        self._server.close()


class PolicyCopies:
    """Copies of the policy in this process, for tests and small models: each rollout has one while it is under way.

    A rollout samples from the weights with which it began. There are as many copies as rollouts under way, and
    computing shares the cores, or the GPU, with training.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._free: list[nn.Module] = []
        self._in_use: dict[Engine, nn.Module] = {}

    def begin(self, version: int, prompt_ids: Sequence[int]) -> None:
        """Nothing is to be told: copies are made when rollouts begin."""

    def engine(self, end: TurnEnd, options: EngineOptions) -> Engine:
        """For a rollout that begins now, and samples from the present weights."""
        policy = self._trainer.accelerator.unwrap_model(self._trainer.model)
        model = self._free.pop() if self._free else _copied(policy)
        model.load_state_dict(policy.state_dict())
        kind = "slots" if options.rollout_engine == "auto" else options.rollout_engine
        engine = model_engine(model, end, self._trainer.generation_config, kind, options.kv_cache_gib)
        if not isinstance(engine, SlotEngine):
            raise ValueError(f"`rollout_engine` is {kind!r}, but copies of the policy sample in 'slots'.")
        engine.gives_logprobs = True
        self._in_use[engine] = model
        return engine

    def finish(self, engine: Engine) -> None:
        """The copy of an engine may be used again."""
        self._free.append(self._in_use.pop(engine))

    def close(self) -> None:
        """Nothing to cut: rollouts end with their next step."""


def policy_ahead(trainer: GRPOTrainer) -> ServerPolicy | PolicyCopies:
    """What a trainer's configuration asks for."""
    return ServerPolicy(trainer) if trainer.use_vllm else PolicyCopies(trainer)


def _copied(policy: nn.Module) -> nn.Module:
    model = copy.deepcopy(policy).eval().requires_grad_(False)
    for module in model.modules():
        # What TRL and accelerate have put over `forward` calls the original.
        module.__dict__.pop("forward", None)
    for parameter in model.parameters():
        parameter.grad = None
    return model
