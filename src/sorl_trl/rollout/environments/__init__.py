"""Environments: one object per trajectory, tools, TRL's environment objects, and search."""
