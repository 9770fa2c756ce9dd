"""Terms and forms of the loss that other methods have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class LossOptions:
    """Terms and forms of the loss that other methods have."""
