"""Baselines of groups, and which groups and trajectories are trained on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class GroupOptions:
    """Baselines of groups, and which groups and trajectories are trained on."""
