"""What changes the training loop itself, each in a file of its own. It may change or go in any version."""

from sorl_trl.experimental.group_refill import GroupRefillConfig, GroupRefillTrainer
from sorl_trl.experimental.seeupo import SeeUPOConfig, SeeUPOTrainer

__all__ = ["GroupRefillConfig", "GroupRefillTrainer", "SeeUPOConfig", "SeeUPOTrainer"]
