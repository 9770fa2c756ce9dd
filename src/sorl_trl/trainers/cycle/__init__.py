"""The generation cycle: rollouts that wait, and checkpoints in the middle of a cycle."""
