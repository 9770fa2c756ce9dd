"""`python -m benchmarks.gpu_check`: what runs, for how long, and what is written."""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.records import OUT_OF_TIME, Check, Context, Record, run_checks

RESULT = Path(__file__).parents[1] / "results/gpu_check.json"
NO_GPU = "there is no CUDA GPU here"
NAMES = (
    *(f"train/{name}" for name in ("so_grpo", "so_grpo_lora", "so_ppo_head", "so_ppo_adapter", "so_ppo_model")),
    "losses_as_on_cpu",
    "overhead",
    "critic_cost",
    "zero2",
    "zero3",
    "fsdp2",
    "vllm_colocate",
)
"""Of all checks, in the order in which they run."""
PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "deepspeed", "vllm")
BUDGET_S = 390.0
"""No check begins after it."""
END_S = 470.0
"""What still runs is ended, so that the command takes less than 8 minutes."""


def load_check(name: str) -> Check:
    """Loads TRL, which takes seconds."""
    if name.startswith("train/"):
        from benchmarks.gpu_check.training import trains

        return trains(name.removeprefix("train/").removeprefix("so_ppo_"))
    if name == "losses_as_on_cpu":
        from benchmarks.gpu_check.equality import losses_as_on_cpu

        return losses_as_on_cpu
    if name in ("overhead", "critic_cost"):
        from benchmarks.gpu_check.costs import cost_of_each_critic, overhead_of_the_loss

        return overhead_of_the_loss if name == "overhead" else cost_of_each_critic
    from benchmarks.gpu_check.engines import under, vllm_colocate

    return vllm_colocate if name == "vllm_colocate" else under(name)


def deferred(name: str) -> Check:
    """Loads the check when it runs, so that a package that is missing fails what needs it, and is said."""

    def check(context: Context) -> dict[str, Any]:
        return load_check(name)(context)

    return check


class Report:
    """The result file, written anew after each check, so that what was found survives whatever comes."""

    def __init__(self, path: Path, device: str, names: Sequence[str]) -> None:
        self._path = path
        self._names = tuple(names)
        self._records: list[Record] = []
        self._facts = {"device": device_name(device), "versions": versions()}
        self._lock = threading.Lock()

    def add(self, record: Record) -> None:
        with self._lock:
            self._records.append(record)
            self._write()
        print(
            f"{record.name}: {record.status} in {record.seconds:.1f} s {_last_line(record.reason)}".rstrip(),
            flush=True,
        )

    def skip_all(self, reason: str) -> None:
        self._records = [Record(name, "skipped", reason=reason) for name in self._names]
        self._write()

    def give_up(self) -> None:
        """End the process: the check that runs has hung, and the others have no time left. Called by a timer."""
        with self._lock:
            late = self._names[len(self._records) :]
            if not late:
                return
            reason = f"not finished when {END_S:.0f} s were over"
            self._records.append(Record(late[0], "failed", END_S, reason=reason))
            self._records += [Record(name, "skipped", reason=OUT_OF_TIME) for name in late[1:]]
            self._write()
            print(f"{late[0]}: failed, {reason}", flush=True)
            os._exit(1)

    @property
    def status(self) -> str:
        """ "failed" if any check has, "skipped" if all were."""
        statuses = {record.status for record in self._records}
        return next(status for status in ("failed", "ok", "skipped") if status in statuses)

    def summary(self) -> str:
        counts = Counter(record.status for record in self._records)
        return ", ".join(f"{counts[status]} {status}" for status in ("ok", "failed", "skipped"))

    def _write(self) -> None:
        result = {"status": self.status, **self._facts, "checks": [asdict(record) for record in self._records]}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".part")
        partial.write_text(json.dumps(result, indent=2) + "\n")
        partial.replace(self._path)


def device_name(device: str) -> str | None:
    """What the GPU calls itself, "cpu", or None where nothing runs."""
    if device != "cuda":
        return device or None
    import torch

    return str(torch.cuda.get_device_name(0))


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # taken from a path of the user's, or not there
            found[package] = None
    return found


def _last_line(reason: str) -> str:
    lines = reason.strip().splitlines()
    return f"({lines[-1]})" if lines else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_check", description="Every check that needs a GPU; docs/gpu.md explains them."
    )
    parser.add_argument("--output", type=Path, default=RESULT, help="JSON file to write (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes, to work on the checks themselves"
    )
    parser.add_argument(
        "--budget_s", type=float, default=BUDGET_S, help="seconds after which no check begins (default: %(default)s)"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a check failed, else 0, also where all were skipped."""
    started = time.monotonic()
    options = _parser().parse_args(arguments)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # transformers would spread one process over all GPUs
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    names = [name for name in NAMES if name in options.only]
    if options.device == "cuda" and not has_gpu():
        Report(options.output, "", names).skip_all(NO_GPU)
        print(f"gpu_check skipped: {NO_GPU}. {options.output} says so.")
        return 0
    report = Report(options.output, options.device, names)
    timer = threading.Timer(started + END_S - time.monotonic(), report.give_up)
    timer.daemon = True
    timer.start()
    try:
        _run(report, names, options, started)
    finally:
        timer.cancel()
    print(f"gpu_check: {report.summary()} in {time.monotonic() - started:.0f} s. {options.output} has the figures.")
    return int(report.status == "failed")


def has_gpu() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def _run(report: Report, names: Sequence[str], options: Any, started: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        small = options.device == "cpu"
        context = Context(options.device, small, Path(folder), deadline=started + END_S - 15)
        checks = {name: deferred(name) for name in names}
        for record in run_checks(checks, context, started + options.budget_s):
            report.add(record)
