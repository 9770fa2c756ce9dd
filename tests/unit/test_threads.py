from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

from sorl_trl.threads import DaemonThreads

HANGING = """
import threading
from sorl_trl.threads import DaemonThreads
threads = DaemonThreads(1, "hangs")
threads.submit(threading.Event().wait)
"""


def alive(name: str) -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == name]


def test_what_is_submitted_is_called_and_its_error_raised() -> None:
    threads = DaemonThreads(2, "called")
    assert [threads.submit(pow, 2, each).result(10) for each in range(5)] == [1, 2, 4, 8, 16]
    with pytest.raises(ZeroDivisionError):
        threads.submit(divmod, 1, 0).result(10)


def test_they_begin_when_needed_and_end_with_what_they_belong_to() -> None:
    threads = DaemonThreads(2, "begins and ends")
    assert not alive("begins and ends")
    threads.submit(threads.submit, int).result(10)  # what was done last holds nothing
    del threads
    gc.collect()
    for each in alive("begins and ends"):
        each.join(10)
    assert not alive("begins and ends")


def test_one_that_hangs_does_not_keep_the_process() -> None:
    subprocess.run([sys.executable, "-c", HANGING], check=True, timeout=60)
