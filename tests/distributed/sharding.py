"""FSDP2 on CPUs: torch shards there, and accelerate, which sees no accelerator, must be told to."""

from __future__ import annotations

import os
from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType


def shard_on_cpu() -> None:
    """Where `accelerate launch` asks for FSDP, have accelerate use it on CPUs as it does on GPUs."""
    if os.environ.get("ACCELERATE_USE_FSDP") != "true":
        return
    begin = AcceleratorState.__init__

    def begin_sharded(self: Any, *given: Any, fsdp_plugin: Any = None, **named: Any) -> None:
        begin(self, *given, fsdp_plugin=fsdp_plugin, **named)
        if fsdp_plugin is not None:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = begin_sharded  # type: ignore[method-assign]
