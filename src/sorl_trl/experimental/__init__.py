"""Trainers that change the training loop itself, one file each. Any version may change or remove them."""

from sorl_trl.experimental.group_refill import GroupRefillConfig, GroupRefillTrainer

__all__ = ["GroupRefillConfig", "GroupRefillTrainer"]
