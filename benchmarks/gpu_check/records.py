"""A check, what is recorded of it, and a run of several under one budget of time."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OUT_OF_TIME = "out of time"
REASON_LENGTH = 4000
"""Characters of a failure's reason that are kept: its end says most."""


class Skipped(Exception):
    """What the check needs is not here; the message says what."""


@dataclass(frozen=True)
class Record:
    """What became of one check."""

    name: str
    status: str
    """"ok", "failed" or "skipped"."""
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    """Why it failed or was skipped."""


@dataclass(frozen=True)
class Context:
    """What a check is given."""

    device: str
    """"cuda" or "cpu"."""
    small: bool
    """Whether to take sizes that a CPU goes through in seconds."""
    folder: Path
    """For files of its own."""
    deadline: float
    """On the clock of `time.monotonic`: what runs in a process of its own is ended then."""

    @property
    def precision(self) -> dict[str, Any]:
        """Fields of a trainer's config: in bfloat16, on this device."""
        return {"use_cpu": self.device == "cpu", "bf16": True}

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()


Check = Callable[[Context], dict[str, Any]]
"""Returns its figures. Raises `Skipped`, or anything else where it fails."""


def run_check(name: str, check: Check, context: Context) -> Record:
    """Whatever `check` raises becomes its record."""
    context.folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    status, figures, reason = "ok", {}, ""
    try:
        figures = check(context)
    except Skipped as skipped:
        status, reason = "skipped", str(skipped)
    except Exception as error:
        status, reason = "failed", _described(error)
    finally:
        _free(context.device)
    return Record(name, status, round(time.perf_counter() - started, 2), figures, reason)


def _described(error: Exception) -> str:
    """An expectation that was not met speaks for itself; of all else, where it happened."""
    text = str(error) if isinstance(error, AssertionError) else "".join(traceback.format_exception(error))
    return (text or repr(error))[-REASON_LENGTH:]


def _free(device: str) -> None:
    """Give the memory of what the check has built to the next one."""
    gc.collect()
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()


def run_checks(checks: Mapping[str, Check], context: Context, no_more_after: float) -> Iterator[Record]:
    """The record of each check, as it comes; a check that would begin after `no_more_after` is skipped.

    Args:
        checks: by name, in the order in which they run.
        context: of all of them; each has a folder of its own within the context's.
        no_more_after: on the clock of `time.monotonic`.
    """
    for number, (name, check) in enumerate(checks.items()):
        if time.monotonic() > no_more_after:
            yield Record(name, "skipped", reason=OUT_OF_TIME)
        else:
            own = Context(context.device, context.small, context.folder / str(number), context.deadline)
            yield run_check(name, check, own)
