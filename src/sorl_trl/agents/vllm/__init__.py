"""Generation with TRL's vLLM, row by row, colocated or as a server. See docs/vllm.md."""

from __future__ import annotations

from typing import Any

from sorl_trl.agents.vllm.colocate import VLLMColocateEngine
from sorl_trl.agents.vllm.connection import EngineUnavailable, VLLMServer
from sorl_trl.agents.vllm.server import VLLMServerEngine, server_url
from sorl_trl.agents.vllm.turns import VLLMEngine
from sorl_trl.rollout import TurnEnd

__all__ = ["EngineUnavailable", "VLLMColocateEngine", "VLLMEngine", "VLLMServerEngine", "vllm_engine"]


def vllm_engine(vllm_generation: Any, end: TurnEnd) -> VLLMEngine:
    """The engine around TRL's `VLLMGeneration`, in either mode.

    All ranks call it together, once per rollout, after the weights have been synchronized. Raises what the engines
    raise.
    """
    if vllm_generation.mode == "server":
        vllm_generation.accelerator.wait_for_everyone()  # until the main process has sent the weights
        if not hasattr(vllm_generation, "turn_server"):  # all rollouts share it and its connections
            vllm_generation.turn_server = VLLMServer(server_url(vllm_generation))
        return VLLMServerEngine(vllm_generation, end, vllm_generation.turn_server)
    return VLLMColocateEngine(vllm_generation, end)
