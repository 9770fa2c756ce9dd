"""How a trainer of this package is called: as TRL's is."""

from __future__ import annotations

import inspect
from typing import Any

from trl import GRPOTrainer


def trainer_arguments(*positional: Any, **named: Any) -> dict[str, Any]:
    """The arguments of `GRPOTrainer` that were given, each by its name.

    Raises TypeError, as a call of `GRPOTrainer` does, where they do not fit.
    """
    return dict(inspect.signature(GRPOTrainer).bind(*positional, **named).arguments)
