"""How many tokens of keys and values there is room for."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

# The rest is for what a forward needs (activations, logits) and for buffers while they grow.
_RECLAIMED = ("active_file", "inactive_file", "slab_reclaimable")  # what files were read stays until it is needed
_SHARE = {"cuda": 0.6, "cpu": 0.5}


def free_bytes(device: torch.device) -> int:
    """A part of the memory that is free now on the device, or in this machine, shared with the other local ranks."""
    if device.type == "cuda":
        unclaimed, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int((unclaimed + reserved) * _SHARE["cuda"])
    ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    return int(_available_ram() * _SHARE["cpu"]) // ranks


def _available_ram() -> int:
    """What Linux says is available, to this container where it is in one; elsewhere half of what the machine has."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    (available,) = (line.split()[1] for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
    return int(min(int(available) * 1024, _left_to_container()))


def _left_to_container(folder: Path = Path("/sys/fs/cgroup")) -> float:
    """The limit of the control group less what is used of it for good; infinite without a limit."""
    try:
        limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
        parts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # there is no such group, or its limit is "max"
        return math.inf
    return max(limit - used + sum(int(parts.get(name, 0)) for name in _RECLAIMED), 0)
