"""Shows how a run is going: a progress bar, and a guard against collapse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sorl_trl.diagnostics.collapse import (
    DEFAULT_RULES,
    Alarm,
    CollapseDetector,
    Fall,
    Level,
    NotFinite,
    Rule,
    detect,
)

if TYPE_CHECKING:
    from sorl_trl.diagnostics.callbacks import CollapseGuard, TurnProgressCallback

__all__ = [
    "DEFAULT_RULES",
    "Alarm",
    "CollapseDetector",
    "CollapseGuard",
    "Fall",
    "Level",
    "NotFinite",
    "Rule",
    "TurnProgressCallback",
    "detect",
]


def __getattr__(name: str) -> Any:
    # transformers takes seconds to import; `sorl view` must not pay for it.
    if name not in ("CollapseGuard", "TurnProgressCallback"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sorl_trl.diagnostics import callbacks

    return getattr(callbacks, name)
