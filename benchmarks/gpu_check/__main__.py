"""`python -m benchmarks.gpu_check`: every check that needs a GPU, and a file of what each found."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check import checks, engines
from benchmarks.gpu_check.checks import Check, Context, Skipped
from sorl_trl.files import write_whole

RESULT = Path(__file__).parents[1] / "results/gpu_check.json"
TRAINED = tuple(
    f"train/{name}" for name in ("so_grpo", "so_grpo_lora", "so_ppo_head", "so_ppo_adapter", "so_ppo_model")
)
NAMES = (*TRAINED, "losses_as_on_cpu", "zero2", "zero3", "fsdp2", "vllm_colocate", "vllm_ahead")
"""Of all checks, in the order in which they run."""
PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "deepspeed", "vllm")
REASON_LENGTH = 4000
"""Characters of a failure's reason that are kept, from its end, which is the most informative part."""


def load_check(name: str) -> Check:
    if name in TRAINED:
        return checks.trains(name.removeprefix("train/").removeprefix("so_ppo_"))
    single = (checks.losses_as_on_cpu, engines.vllm_colocate, engines.vllm_ahead)
    return next((check for check in single if check.__name__ == name), engines.under(name))


def run_check(name: str, context: Context) -> dict[str, Any]:
    """What became of a check: name, status ("ok", "failed", "skipped"), seconds, figures and, unless ok, a reason."""
    context.folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    record: dict[str, Any] = {"name": name, "status": "ok", "figures": {}, "reason": ""}
    try:
        record["figures"] = load_check(name)(context)
    except Skipped as reason:
        record |= {"status": "skipped", "reason": str(reason)}
    except Exception:  # whatever it is, the other checks go on
        record |= {"status": "failed", "reason": traceback.format_exc()[-REASON_LENGTH:]}
    gc.collect()  # gives the memory of what the check has built to the next one
    return record | {"seconds": round(time.perf_counter() - started, 2)}


def status_of(records: Sequence[dict[str, Any]]) -> str:
    """ "failed" if any check has, "skipped" if all were."""
    statuses = {record["status"] for record in records}
    return next(status for status in ("failed", "ok", "skipped") if status in statuses)


def write(records: Sequence[dict[str, Any]], device: str, path: Path) -> None:
    versions = {name: version(name) for name in PACKAGES if find_spec(name)}
    result = {"status": status_of(records), "device": device, "versions": versions, "checks": list(records)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (json.dumps(result, indent=2) + "\n").encode())


def run_all(names: Iterable[str], device: str, output: Path, other_gpu: str | None) -> list[dict[str, Any]]:
    """Every check, the file written anew after each: what was found survives whatever comes."""
    named = str(torch.cuda.get_device_name(0)) if device == "cuda" else device
    records = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            records.append(run_check(name, Context(device, Path(folder) / name.replace("/", "_"), other_gpu)))
            torch.cuda.empty_cache()
            write(records, named, output)
            print(
                "{name}: {status} in {seconds:.1f} s".format(**records[-1]), records[-1]["reason"][-200:], flush=True
            )
    return records


def main(words: Sequence[str] | None = None) -> int:
    """Exit code: 1 if a check failed, else 0, also where all were skipped."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=(__doc__ or "").split(": ")[1])
    parser.add_argument("--output", type=Path, default=RESULT, help="JSON file to write (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes, to try the checks")
    arguments = parser.parse_args(words)
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    gpu, *others = gpus.split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu  # transformers would spread one process over all
    names = [name for name in NAMES if name in arguments.only]
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check skipped: there is no CUDA GPU here.")
        return 0
    other_gpu = others[0] if others and arguments.device == "cuda" else None
    records = run_all(names, arguments.device, arguments.output, other_gpu)
    print(f"gpu_check: {status_of(records)}. {arguments.output} has the figures.")
    return int(status_of(records) == "failed")


if __name__ == "__main__":
    sys.exit(main())
