"""The search server as `benchmarks.search` asks it: from many threads at once, one query at a time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from sorl_trl.search import SearchBackend

THREADS = 32


class Served(NamedTuple):
    """A server of this package, in a process of its own."""

    url: str
    process: psutil.Process


@contextmanager
def served(index_dir: Path) -> Iterator[Served]:
    """`sorl serve` on a free port, ended with the block."""
    script = "from sorl_trl.search.commands import serve; serve()"
    command = [sys.executable, "-c", script, "--index", str(index_dir), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            greeting = server.stdout.readline()
            if not greeting:
                raise RuntimeError(f"the server did not start: exit code {server.wait()}")
            yield Served(greeting.split()[-1], psutil.Process(server.pid))
        finally:
            server.terminate()


def ask_at_once(backend: SearchBackend, queries: Sequence[str], k: int) -> None:
    """One query at a time, `THREADS` of them under way."""
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda query: backend.search_batch([query], k), queries))


def cpu_seconds(server: psutil.Process) -> float:
    """What this process and the server have used so far."""
    times = server.cpu_times()
    return time.process_time() + float(times.user + times.system)
