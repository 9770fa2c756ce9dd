"""Shows how a run is going: a progress bar, curves, reports, and a guard against collapse.

`sorl report RUN…` makes a page of one or several runs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sorl_trl.diagnostics.collapse_detector import Alarm, CollapseDetector, detect
from sorl_trl.diagnostics.collapse_rules import DEFAULT_RULES, Fall, Level, NotFinite, Rule

if TYPE_CHECKING:
    from sorl_trl.diagnostics.collapse_guard import CollapseGuard
    from sorl_trl.diagnostics.progress import TurnProgressCallback

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
_CALLBACKS = {"CollapseGuard": "collapse_guard", "TurnProgressCallback": "progress"}


def __getattr__(name: str) -> Any:
    # transformers takes seconds to import; `sorl report` must not pay for it.
    if name not in _CALLBACKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_CALLBACKS[name]}"), name)
