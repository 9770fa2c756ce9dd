"""Stabilized off-policy RL for multi-turn LLM agents, on top of TRL (SORL, arXiv 2511.20718)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sorl_trl.endpoint import EndpointRollout, agent_reward
    from sorl_trl.methods import Method
    from sorl_trl.trainers import (
        AgentRollout,
        SearchRollout,
        SOGRPOConfig,
        SOGRPOTrainer,
        SOPPOConfig,
        SOPPOTrainer,
        answer_in_messages,
        chatml_tools,
        load_critic,
        search_tool,
    )

__all__ = [
    "AgentRollout",
    "EndpointRollout",
    "Method",
    "SOGRPOConfig",
    "SOGRPOTrainer",
    "SOPPOConfig",
    "SOPPOTrainer",
    "SearchRollout",
    "agent_reward",
    "answer_in_messages",
    "chatml_tools",
    "load_critic",
    "search_tool",
]


def __getattr__(name: str) -> Any:
    # TRL takes seconds to import; `sorl_trl.ops` or `sorl_trl.search` alone must not pay for it.
    if name == "Method":
        from sorl_trl.methods import Method

        return Method
    if name in ("EndpointRollout", "agent_reward"):
        from sorl_trl import endpoint

        return getattr(endpoint, name)
    if name in __all__:
        from sorl_trl import trainers

        return getattr(trainers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
