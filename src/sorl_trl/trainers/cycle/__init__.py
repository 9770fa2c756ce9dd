"""The generation cycle, which is a rollout and its updates, with checkpoints within it and an exact resume."""
