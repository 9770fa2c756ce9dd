"""Trainers that change the training loop itself, a file each. They may change or disappear in any version."""

from sorl_trl.experimental.group_refill import GroupRefillConfig, GroupRefillTrainer
from sorl_trl.experimental.seeupo import SeeUPOConfig, SeeUPOTrainer

__all__ = ["GroupRefillConfig", "GroupRefillTrainer", "SeeUPOConfig", "SeeUPOTrainer"]
