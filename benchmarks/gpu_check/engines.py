"""One process under ZeRO-2, ZeRO-3 and FSDP2, and vLLM beside the trainer: each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.records import Check, Context, Skipped

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 150.0
OUTPUT_LENGTH = 3000
"""Characters of a failed process's output that are kept."""


def under(engine: str) -> Check:
    """SO-PPO with a head trains under `accelerate_configs/{engine}.yaml`."""

    def check(context: Context) -> dict[str, Any]:
        on_cpu = context.device == "cpu"
        if engine.startswith("zero") and find_spec("deepspeed") is None:
            raise Skipped("DeepSpeed is not installed")
        if engine == "fsdp2" and on_cpu:
            raise Skipped("without a GPU accelerate turns FSDP into DDP")
        folder = ROOT / ("tests/distributed/configs" if on_cpu else "accelerate_configs")
        config = folder / f"{engine}{'_cpu' if on_cpu else ''}.yaml"
        launcher = ["accelerate.commands.launch", "--config_file", str(config), "--num_processes", "1"]
        return _in_a_process(context, engine, [*launcher, "--main_process_port", "0", "-m"])

    return check


def vllm_colocate(context: Context) -> dict[str, Any]:
    """SO-GRPO samples with vLLM on the GPU that it trains on; both see nearly the same log-probabilities."""
    if context.device == "cpu":
        raise Skipped("vLLM's CUDA build needs a GPU; `make test-vllm` runs its CPU build")
    try:
        version("vllm")  # the CPU build is distributed under another name
    except PackageNotFoundError:
        raise Skipped("CUDA's vLLM is not installed") from None
    return _in_a_process(context, "vllm", [])


def _in_a_process(context: Context, engine: str, launcher: list[str]) -> dict[str, Any]:
    """What the worker writes; AssertionError with the end of its output if it writes nothing in time."""
    job, result = context.folder / "job.json", context.folder / "result.json"
    job.write_text(json.dumps({"engine": engine, "device": context.device, "small": context.small}))
    command = [sys.executable, "-m", *launcher, "benchmarks.gpu_check.worker", str(job)]
    limit_s = max(1.0, min(TIMEOUT_S, context.seconds_left))
    ended = _run(command, context.folder / "output.txt", limit_s, environment(context.device))
    if not result.exists():  # processes now and then abort while they exit, after all is done
        output = (context.folder / "output.txt").read_text(errors="replace")[-OUTPUT_LENGTH:]
        raise AssertionError(f"{ended} and left no result. Its output ends in:\n{output}")
    figures: dict[str, Any] = json.loads(result.read_text())
    return figures


def environment(device: str) -> dict[str, str]:
    """The package and the benchmarks are found where they are not installed; nothing is looked for in a network."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    added = {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    if device == "cpu":
        added |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return {**os.environ, **added}


def _run(command: list[str], log: Path, limit_s: float, env: dict[str, str]) -> str:
    """How the process ended, in words. The launcher ends its workers when it is told to stop."""
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=env)
        try:
            return f"The process ended with exit code {process.wait(limit_s)}"
        except subprocess.TimeoutExpired:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10.0)
            return f"The process was stopped after {limit_s:.0f} s"
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
