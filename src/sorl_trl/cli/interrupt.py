"""Ctrl-C while `sorl train` trains: one line says how to go on, and exit code 130. A second one ends at once."""

from __future__ import annotations

import atexit
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sorl_trl.command_line import COMMAND_LINE, INTERRUPTED

RESUME, ANEW = "--resume_from_checkpoint", "--overwrite_output_dir"


@contextmanager
def interruptible(trainer: Any, words: Sequence[str]) -> Iterator[None]:
    """Around training with a command line.

    A signal interrupts training wherever it is, and what that breaks on its way out would be many tracebacks, of
    other processes too: none is shown.
    """
    interrupted = False

    def interrupt(*_: Any) -> None:
        nonlocal interrupted
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
        interrupted = True
        if trainer.is_world_process_zero():
            # Not by `print`, which may be what is interrupted; the progress bar has left its line open.
            os.write(sys.stderr.fileno(), f"\n{_how_to_go_on(trainer, words)}\n".encode())
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except BaseException:
        if not interrupted:
            raise
        atexit._run_exitfuncs()  # of trackers; the rest of an orderly end waits for all threads
        os._exit(INTERRUPTED)
    finally:
        signal.signal(signal.SIGINT, before)


def _how_to_go_on(trainer: Any, words: Sequence[str]) -> str:
    from sorl_trl.trainers.cycle.resume_point import newest_whole

    whole = newest_whole(Path(trainer.args.output_dir))
    at = f"interrupted at step {trainer.state.global_step}"
    said = shlex.split(os.environ.get(COMMAND_LINE, "")) or ["sorl", "train", *words]
    command = shlex.join(word for word in said if word.replace("-", "_") != ANEW.replace("-", "_"))
    if whole is None:
        return f"{at}, before a checkpoint was saved; start anew with: {command} {ANEW}"
    # After what the command line may say of it already, whose last word counts.
    return f"{at}; go on with: {command} {RESUME} {shlex.quote(str(whole))}"
