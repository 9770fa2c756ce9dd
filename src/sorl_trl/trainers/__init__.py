"""Trainers: TRL's `GRPOTrainer` made turn-level."""

from warnings import filterwarnings

from sorl_trl.rollout.agent_rollout import AgentRollout, SearchRollout
from sorl_trl.rollout.chat import chatml_tools
from sorl_trl.rollout.tools import answer_in_messages, search_tool
from sorl_trl.trainers.base import SOGRPOTrainer
from sorl_trl.trainers.config import SOGRPOConfig, SOPPOConfig
from sorl_trl.trainers.critic_checkpoint import ValueModel, load_critic
from sorl_trl.trainers.so_ppo_trainer import SOPPOTrainer

# In every rollout, TRL calls methods of models that transformers 5 has renamed, and "once" shows a warning again after
# any filter changes. A user's own filters come first.
filterwarnings("ignore", category=FutureWarning, module=r"transformers\.modeling_utils", append=True)

__all__ = [
    "AgentRollout",
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
