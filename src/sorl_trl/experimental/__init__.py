"""Trainers that change the training loop itself, one file each. Any version may change or remove them."""

from sorl_trl.experimental.agents import MultiAgentTrainer
from sorl_trl.experimental.group_refill import GroupRefillConfig, GroupRefillTrainer
from sorl_trl.experimental.seeupo import SeeUPOConfig, SeeUPOTrainer

__all__ = ["GroupRefillConfig", "GroupRefillTrainer", "MultiAgentTrainer", "SeeUPOConfig", "SeeUPOTrainer"]
