"""The critic of SO-PPO, which runs in the policy's forward pass and is saved beside it, but can be loaded alone."""
