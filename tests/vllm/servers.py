"""A vLLM server as a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.vllm import shims

ROOT = Path(__file__).parents[2]
START_S = 240.0


@dataclass(frozen=True)
class Server:
    """One that has started."""

    url: str
    process: subprocess.Popen[bytes]


@contextmanager
def serving(policy: Path, window: int, log: Path, dtype: str = "float32", *more: str) -> Iterator[Server]:
    """A server that samples from `policy` and reads `window` tokens. It may get more arguments.

    Raises AssertionError with the end of its output if it does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = {"host": "127.0.0.1", "port": port, "dtype": dtype, "max-model-len": window, "max-logprobs": -1}
    flags |= {"logprobs-mode": "processed_logprobs", "kv-cache-memory-bytes": shims.KV_CACHE_BYTES}
    flags |= {"weight-transfer-config": '{"backend": "file"}'}
    flags |= {"worker-extension-cls": "tests.vllm.file_transfer.WorkerExtension"}
    command = [sys.executable, "-m", "tests.vllm.serve", "serve", str(policy), "--enforce-eager"]
    command += ["--no-enable-chunked-prefill"]  # a seeded request that is read in parts ends the engine on a CPU
    command += [*(f"--{name}={value}" for name, value in flags.items()), *more]
    environment = {**os.environ, **shims.ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1"}
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # a server has its engine in a process of its own
    environment["VLLM_HOST_IP"] = "127.0.0.1"
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(url, process, log)
        yield Server(url, process)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):  # its engine is a process of its own, and outlives it where it was killed
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(f"The server did not start. Its output ends in:\n{log.read_text()[-6000:]}")
