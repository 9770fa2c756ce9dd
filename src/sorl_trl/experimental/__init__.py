"""What changes the training loop itself, each in a file of its own. It may change or go in any version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sorl_trl.experimental.group_refill import GroupRefillConfig, GroupRefillTrainer
    from sorl_trl.experimental.seeupo import SeeUPOConfig, SeeUPOTrainer

__all__ = ["GroupRefillConfig", "GroupRefillTrainer", "SeeUPOConfig", "SeeUPOTrainer"]


def __getattr__(name: str) -> Any:
    # As in `sorl_trl`: TRL takes seconds to import.
    if name in ("GroupRefillConfig", "GroupRefillTrainer"):
        from sorl_trl.experimental import group_refill

        return getattr(group_refill, name)
    if name in ("SeeUPOConfig", "SeeUPOTrainer"):
        from sorl_trl.experimental import seeupo

        return getattr(seeupo, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
