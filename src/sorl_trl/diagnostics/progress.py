"""A progress bar that shows how training goes, instead of a dictionary of sixty numbers per step."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.contrib.logging import logging_redirect_tqdm
from tqdm.std import tqdm
from transformers import ProgressCallback, TrainerControl, TrainerState, TrainingArguments

from sorl_trl.command_line import is_first_process
from sorl_trl.text import one_line

SHOWN = {
    "reward": "reward",
    "clip": "clip_ratio/region_mean",
    "kl": "kl_to_old",
    "turns": "turns/per_trajectory",
    "entropy": "entropy",
}
"""Metrics of docs/metrics.md by their label in the bar."""


class TurnProgressCallback(ProgressCallback):
    """transformers' `ProgressCallback`, with the key metrics beside the bar. `trainer_state.json` has all metrics.

    TRL logs rollout metrics only on the steps that generate, so the bar keeps showing the last known values.
    """

    def __init__(self) -> None:
        super().__init__()
        self._latest: dict[str, str] = {}

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or self.training_bar is None or logs is None:
            return
        for label, metric in SHOWN.items():
            if isinstance(logs.get(metric), float):
                self._latest[label] = f"{logs[metric]:.3f}"
        self.training_bar.set_postfix(self._latest, refresh=False)


@contextmanager
def whole_lines() -> Iterator[None]:
    """Within it, every warning and log message is printed on its own line above the bar, once per machine.

    At its end, it closes bars that an error has left open, so that later output begins on a new line.
    """

    def show(message: Warning | str, *_: Any) -> None:
        if is_first_process():
            tqdm.write(f"warning: {one_line(message)}", file=sys.stderr)

    loggers = [logging.getLogger(), logging.getLogger("transformers")]
    with warnings.catch_warnings(), logging_redirect_tqdm(loggers):
        warnings.showwarning = show  # type: ignore[assignment]
        # Future changes of libraries concern those who call them, not our users.
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers|trl|accelerate|torch")
        try:
            yield
        finally:
            for bar in [*tqdm._instances]:
                bar.close()
