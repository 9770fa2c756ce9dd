"""The critic of SO-PPO: built into the policy's forward pass, trained, saved beside the policy, loaded on its own."""
