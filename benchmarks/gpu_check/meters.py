"""Time and memory by the device's own means."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from benchmarks.live_bytes import LiveBytes

TIMERS = {"cuda": "torch.cuda.Event", "cpu": "time.perf_counter (there is no GPU whose timers could be used)"}
MEMORY = {"cuda": "torch.cuda.max_memory_allocated", "cpu": "bytes of live tensors, counted by torch"}


class Stopwatch:
    """Seconds that the device took for what was done within it: its own timer says so."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        self.seconds = 0.0

    def __enter__(self) -> Stopwatch:
        if self._on_gpu:
            self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            self._start.record()
        else:
            self._started = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            return
        if self._on_gpu:
            self._end.record()
            torch.cuda.synchronize()
            self.seconds = self._start.elapsed_time(self._end) / 1000
        else:
            self.seconds = time.perf_counter() - self._started


def peak_mib(device: str, work: Callable[[], Any], held: Callable[[], Iterable[Tensor]]) -> float:
    """MiB at the peak of `work`, beside what others hold.

    Args:
        device: "cuda" or "cpu".
        work: to be measured.
        held: the tensors that `work` finds: a GPU counts them itself.
    """
    if device == "cpu":
        with LiveBytes(held()) as live:
            work()
        return live.peak / 2**20
    own = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held()}.values())
    torch.cuda.synchronize()
    others = torch.cuda.memory_allocated() - own
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - others) / 2**20
