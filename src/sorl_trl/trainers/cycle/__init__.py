"""The generation cycle: rollouts that wait, checkpoints in the middle of a cycle, and going back to one."""
