"""Trainers: TRL's `GRPOTrainer` made turn-level."""

from sorl_trl.agents.agent_rollout import AgentRollout, SearchRollout
from sorl_trl.agents.chat import chatml_tools
from sorl_trl.agents.native_tools import answer_in_messages, search_tool
from sorl_trl.trainers.config import SOGRPOConfig
from sorl_trl.trainers.critic.checkpoint import ValueModel, load_critic
from sorl_trl.trainers.information_gain import InformationGain
from sorl_trl.trainers.so_grpo_trainer import SOGRPOTrainer
from sorl_trl.trainers.so_ppo_config import SOPPOConfig
from sorl_trl.trainers.so_ppo_trainer import SOPPOTrainer

__all__ = [
    "AgentRollout",
    "InformationGain",
    "SOGRPOConfig",
    "SOGRPOTrainer",
    "SOPPOConfig",
    "SOPPOTrainer",
    "SearchRollout",
    "ValueModel",
    "answer_in_messages",
    "chatml_tools",
    "load_critic",
    "search_tool",
]
