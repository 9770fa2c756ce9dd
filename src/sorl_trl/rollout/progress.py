"""Progress within a rollout: how many trajectories have ended, and tokens a second."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any, TypeAlias

from tqdm.auto import tqdm

Progress: TypeAlias = Callable[[int, float], None]
"""Told after each poll how many trajectories of a rollout have ended, and how many tokens it samples a second."""


class RolloutBar:
    """A bar below that of training, for all rollouts under way, in any threads.

    Only the main process draws it, on a terminal or in a notebook, unless `disable_tqdm` is set.
    """

    def __init__(self, args: Any) -> None:
        self._disable = True if args.disable_tqdm or args.process_index else None  # None: unless it is a terminal
        self._lock = Lock()
        self._bar: Any = None
        self._under_way: dict[object, tuple[int, int, float]] = {}
        """Of each rollout, its trajectories, how many have ended, and tokens a second."""

    def begin(self, size: int) -> Progress:
        """What is to be told of the progress of a rollout of `size` trajectories."""
        if self._bar is None:  # only now, so that it is below the bars that there are
            form = "rollout: {n}/{total} trajectories{postfix} |{bar}|"
            self._bar = tqdm(bar_format=form, disable=self._disable, leave=False, delay=1, miniters=0)
        rollout = object()

        def tell(ended: int, rate: float) -> None:
            with self._lock:
                self._under_way[rollout] = now = (size, ended, rate)
                if ended == size:
                    del self._under_way[rollout]
                self._bar.total, shown, rates = map(sum, zip(*(self._under_way.values() or [now]), strict=True))
                self._bar.set_postfix_str(f"{rates:,.0f} tokens/s", refresh=False)
                self._bar.update(shown - self._bar.n)

        return tell

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
