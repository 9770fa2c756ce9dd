"""How a run is going: progress bar, curves, reports, and a guard against collapse.

`sorl report RUN…` makes a page of one or several runs.
"""

from sorl_trl.diagnostics.collapse_detector import Alarm, CollapseDetector, detect
from sorl_trl.diagnostics.collapse_guard import CollapseGuard
from sorl_trl.diagnostics.collapse_rules import DEFAULT_RULES, Fall, Level, NotFinite, Rule
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
