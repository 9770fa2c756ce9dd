"""How many bytes tensors hold, counted by torch: exact where a process's resident memory is noisy."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of `tensors`, and of all that operations make within it, while they live.

    What an operation allocates and frees within itself is not seen.

    Args:
        tensors: made before, such as a model's parameters.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: set[int] = set()
        for tensor in tensors:
            self._count(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return output

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()  # one for all views of it
        key, size = storage._cdata, storage.nbytes()
        if key not in self._alive:
            self._alive.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._alive.remove(key)
        self.now -= size
