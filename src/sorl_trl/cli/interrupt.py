"""Ctrl-C while `sorl train` trains: one line says how to continue, and exit code 130. A second one exits at once."""

from __future__ import annotations

import atexit
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sorl_trl.command_line import INTERRUPTED


@contextmanager
def interruptible(trainer: Any) -> Iterator[None]:
    """Within it, Ctrl-C ends training without a traceback.

    A signal interrupts training anywhere, and what breaks on the way out would cause many tracebacks, also in other
    processes.
    """
    interrupted = False

    def interrupt(*_: Any) -> None:
        nonlocal interrupted
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second signal must not cut the line off
        interrupted = True
        if trainer.is_world_process_zero():
            # Not with `print`, which the signal may have interrupted. The progress bar has left its line open.
            os.write(sys.stderr.fileno(), f"\n{_how_to_go_on(trainer)}\n".encode())
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except BaseException:
        if not interrupted:
            raise
        atexit._run_exitfuncs()  # finishes trackers; the rest of an orderly exit would wait for all threads
        os._exit(INTERRUPTED)
    finally:
        signal.signal(signal.SIGINT, before)


def _how_to_go_on(trainer: Any) -> str:
    from sorl_trl.records.resume_point import newest_whole

    step = trainer.state.global_step
    if newest_whole(Path(trainer.args.output_dir)) is not None:
        return f"interrupted at step {step}: the same command with `--resume_from_checkpoint latest` goes on"
    if step == 0:
        return "interrupted before the first step: the same command starts anew"
    return f"interrupted at step {step}, before a checkpoint was saved: remove {trainer.args.output_dir} to start anew"
