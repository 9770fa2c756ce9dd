"""What a check is given, and how it says that it cannot run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class Skipped(Exception):
    """What the check needs is not here; the message says what."""


@dataclass(frozen=True)
class Context:
    """Where a check runs: on "cuda" or "cpu", with a folder of its own."""

    device: str
    folder: Path
    other_gpu: str | None = None
    """A second one, as `CUDA_VISIBLE_DEVICES` names it, which this process does not see."""

    @property
    def small(self) -> bool:
        """Whether to take sizes that a CPU goes through in seconds."""
        return self.device == "cpu"

    @property
    def precision(self) -> dict[str, Any]:
        """Fields of a trainer's config: in bfloat16, on this device."""
        return {"use_cpu": self.device == "cpu", "bf16": True}


Check = Callable[[Context], dict[str, Any]]
"""Returns its figures. Raises `Skipped`, or anything else where it fails."""
