"""Trainers: TRL's `GRPOTrainer` made turn-level."""

from sorl_trl.trainers.agents.agent_rollout import AgentRollout, SearchRollout
from sorl_trl.trainers.agents.native_tools import answer_in_messages, search_tool
from sorl_trl.trainers.config import SOGRPOConfig, SOPPOConfig
from sorl_trl.trainers.so_grpo_trainer import SOGRPOTrainer
from sorl_trl.trainers.turns.information_gain import InformationGain

__all__ = [
    "AgentRollout",
    "InformationGain",
    "SOGRPOConfig",
    "SOGRPOTrainer",
    "SOPPOConfig",
    "SearchRollout",
    "answer_in_messages",
    "search_tool",
]
