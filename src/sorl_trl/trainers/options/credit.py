"""How the turns of a trajectory share in what it earned."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class CreditOptions:
    """How the turns of a trajectory share in what it earned."""
