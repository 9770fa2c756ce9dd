"""Environments beyond search: an object per trajectory, tools side by side, and TRL's environment objects."""
