"""Starts a case in several processes and waits for its result."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
CONFIGS = Path(__file__).parent / "configs"
"""Of CPU processes; those of users are in `accelerate_configs/`."""
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}
ATTEMPTS = 2
WORKER = "tests.distributed.worker"


def launch(config: str, case: Any, timeout_s: float = 180.0, worker: str = WORKER) -> dict[str, Any]:
    """Train `case`, a dataclass that names its `folder`, under `configs/{config}.yaml`; the worker's result.

    A launch is judged by its result file: processes now and then abort while they exit, after all is done. A launch
    that left no file is tried once more, since the same may strike earlier.

    Raises AssertionError with the end of the output if neither attempt left a result.
    """
    return launch_on_machines(config, [case], timeout_s, worker)


def launch_on_machines(
    config: str, cases: Sequence[Any], timeout_s: float = 180.0, worker: str = WORKER
) -> dict[str, Any]:
    """As `launch`, with a launch for each of `cases`, which machine k of `config` has; the first writes the result."""
    folder = Path(cases[0].folder)
    result = folder / "result.json"
    for _ in range(ATTEMPTS):
        commands = machine_commands(config, cases, worker)
        logs = [folder / f"output_{rank}.txt" for rank in range(len(cases))]
        with ThreadPoolExecutor(len(cases)) as pool:
            outputs = [*pool.map(run, commands, logs, [timeout_s] * len(cases))]
        if result.exists():
            return json.loads(result.read_text())
    ends = "\n\n".join(output[-6000:] for output in outputs)
    raise AssertionError(f"{config} left no result for {cases[0]}. The output ends in:\n{ends}")


def machine_commands(config: str, cases: Sequence[Any], worker: str) -> list[list[str]]:
    """The launch on each machine. Of several, each is told its rank and the port of the first."""
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{config}.yaml")]
    port = ["--main_process_port", str(free_port())]
    commands = []
    for rank, case in enumerate(cases):
        case_file = Path(case.folder) / f"case_{rank}.json"
        case_file.write_text(json.dumps(asdict(case)))
        machine = [*port, "--machine_rank", str(rank)] if len(cases) > 1 else []
        commands.append([*launcher, *machine, "-m", worker, config, str(case_file)])
    return commands


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def run(command: list[str], log: Path, timeout_s: float) -> str:
    """Run to the end, or kill the command and all that it started at the timeout; its output."""
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env={**os.environ, **ENVIRONMENT}
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            out.write(f"\nnot finished after {timeout_s} s\n")
        finally:
            _kill(process)
    return log.read_text()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the launcher and its workers, which it starts in sessions of their own, outside its process group."""
    if process.poll() is None:
        launcher = psutil.Process(process.pid)
        family = [launcher, *launcher.children(recursive=True)]
        for running in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                running.kill()
        psutil.wait_procs(family, timeout=5.0)
        process.wait()
