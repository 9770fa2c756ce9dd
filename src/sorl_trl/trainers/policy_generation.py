"""TRL's wrapper of vLLM, as the trainers of this package need it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from sorl_trl.agents.vllm.client import WeightClient
from sorl_trl.trainers.critic import is_critic_name


class PolicyGeneration(VLLMGeneration):
    """TRL's `VLLMGeneration`, but vLLM gets no critic, and a server is reached through a `WeightClient`."""

    def _init_vllm(self) -> None:
        if self.mode != "server":
            super()._init_vllm()
        elif self.accelerator.is_main_process:
            self.vllm_client = WeightClient(
                self.server_base_url or f"http://{self.server_host}:{self.server_port}",
                group_port=self.group_port,
                connection_timeout=self.server_timeout,
            )
            self.vllm_client.init_communicator(device=self.accelerator.device)

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, value) for name, value in super()._iter_named_params() if not is_critic_name(name))


@contextmanager
def used_by_trl() -> Iterator[None]:
    """Within it, TRL's constructor of a trainer makes a `PolicyGeneration`.

    It looks the class up in its module, and the object connects to a server at once, in a way that only NCCL serves.
    There is nothing to pass and nothing to override.
    """
    trls = grpo_trainer.VLLMGeneration
    grpo_trainer.VLLMGeneration = PolicyGeneration
    try:
        yield
    finally:
        grpo_trainer.VLLMGeneration = trls
