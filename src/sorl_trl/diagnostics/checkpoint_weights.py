"""What a checkpoint's weights are, read from its files."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open


def has_finite_weights(checkpoint: Path) -> bool | None:
    """Whether every number in its safetensors files is finite, a critic's included; None where it has no such file.

    One tensor at a time is in memory.
    """
    files = sorted(checkpoint.rglob("*.safetensors"))
    return all(_is_finite(file) for file in files) if files else None


def _is_finite(file: Path) -> bool:
    with safe_open(file, framework="pt") as tensors:
        return all(bool(torch.isfinite(tensors.get_tensor(name)).all()) for name in tensors.keys())  # noqa: SIM118
