"""What samples ahead of training: a vLLM server, or copies of the policy in this process."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from trl import GRPOTrainer

from sorl_trl.rollout import Engine, EngineOptions, TurnEnd, model_engine
from sorl_trl.rollout.slots import SlotEngine
from sorl_trl.trainers.agents.vllm.connection import VLLMServer
from sorl_trl.trainers.agents.vllm.server import VLLMServerEngine, server_url


class ServerPolicy:
    """The policy as a vLLM server has it. Turns that it is generating while its weights change go on with the new."""

    def __init__(self, trainer: Any) -> None:
        self._vllm = trainer.vllm_generation
        self._server = VLLMServer(server_url(self._vllm))

    def begin(self, version: int) -> None:
        """From now on it has the weights of this version; each turn is stamped with what it was sampled from."""
        self._server.version = version

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

    def begin(self, version: int) -> None:
        """Nothing is to be told: copies are made when rollouts begin."""

    def engine(self, end: TurnEnd, options: EngineOptions) -> Engine:
        """For a rollout that begins now, and samples from the present weights."""
        policy = self._trainer.accelerator.unwrap_model(self._trainer.model)
        model = self._free.pop() if self._free else _copied(policy)
        model.load_state_dict(policy.state_dict())
        engine = model_engine(model, end, self._trainer.generation_config, "slots", options.kv_cache_gib)
        assert isinstance(engine, SlotEngine)
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
    with torch.no_grad():
        return model
