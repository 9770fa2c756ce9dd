"""Trainers: TRL's `GRPOTrainer` made turn-level."""

from sorl_trl.trainers.rollout_bridge import SearchRollout
from sorl_trl.trainers.so_grpo_config import SOGRPOConfig
from sorl_trl.trainers.so_grpo_trainer import SOGRPOTrainer

__all__ = ["SOGRPOConfig", "SOGRPOTrainer", "SearchRollout"]
