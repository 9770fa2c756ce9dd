"""How a trainer of this package is called: as TRL's is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from trl import GRPOTrainer

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def called_as(model: Callable[Parameters, Any]) -> Callable[[Callable[..., Result]], Callable[Parameters, Result]]:
    """A decorator of what hands on whatever it is given: it shows the signature of `model`, where that goes.

    `inspect.signature`, `help()` and type checkers see the arguments in the place of `*args, **kwargs`.
    """

    def decorate(function: Callable[..., Result]) -> Callable[Parameters, Result]:
        function.__signature__ = inspect.signature(model)  # type: ignore[attr-defined]
        return function

    return decorate


def trainer_arguments(*positional: Any, **named: Any) -> dict[str, Any]:
    """The arguments of `GRPOTrainer` that were given, each by its name.

    Raises TypeError, as a call of `GRPOTrainer` does, where they do not fit.
    """
    return dict(inspect.signature(GRPOTrainer).bind(*positional, **named).arguments)
