"""Counts where a program would wait for a GPU to learn what a tensor holds."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = {
    *("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal"),
    *("aten::is_nonzero", "aten::unique_consecutive", "aten::unique_dim"),
}
"""Operations whose result, or its shape, depends on what a tensor holds: `.item()`, `int()`, `bool()`, `x[mask]`, …"""
LIBRARY = str(Path(torch.__file__).parent)


class _Counting(TorchDispatchMode):
    def __init__(self, reads: Counter[str]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in READS:
            self.reads[_caller()] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def device_reads() -> Iterator[Counter[str]]:
    """Counts, within it, reads of tensors by who makes them, as "file.py:function".

    On a CPU nothing waits; what counts is where the program asks. `Tensor.tolist` counts once, whatever its size.
    """
    reads: Counter[str] = Counter()
    tolist = torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        reads[_caller()] += 1
        return tolist(tensor)

    torch.Tensor.tolist = counted  # type: ignore[method-assign, assignment]
    try:
        with _Counting(reads):
            yield reads
    finally:
        torch.Tensor.tolist = tolist  # type: ignore[method-assign]


def _caller() -> str:
    """The innermost frame outside of torch and of this module."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(LIBRARY) and frame.filename != __file__:
            return f"{Path(frame.filename).name}:{frame.name}"
    return "unknown"
