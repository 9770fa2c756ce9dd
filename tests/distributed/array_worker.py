"""Runs in every process of a launch: trains the rows of one engine, of those that try every pair of switches.

`accelerate launch --config_file … -m tests.distributed.array_worker ddp_cpu case.json`

Each process writes what it saw: row -> the gradients of its steps, and what it logged.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from tests.distributed.cases import ENGINES
from tests.distributed.worker import engine_facts, write_result
from tests.switch_pairs import ARRAY
from tests.switch_runs import Run, World


def seen(run: Run, expected: dict[str, Any]) -> tuple[list[torch.Tensor], dict[str, Any]]:
    facts = engine_facts(run.trainer)
    assert {name: facts[name] for name in expected} == expected, f"ran under {facts}, not {expected}"
    return run.gradients, run.metrics


def main(config: str, path: str) -> None:
    case = json.loads(Path(path).read_text())
    folder, rank = Path(case["folder"]), os.environ["RANK"]
    world = World(Path(mkdtemp(dir=folder)), case["engine"])  # of this process and this attempt
    rows = {number: row for number, row in enumerate(ARRAY) if row["engine"] == case["engine"]}
    runs = {}
    for number, row in rows.items():
        print(f"row {number}: {row}", flush=True)
        runs[number] = seen(world.train(row, folder / "output"), ENGINES[config])
    torch.save(runs, folder / f"rank_{rank}.pt")
    write_result(folder, {"rows": len(runs)})


if __name__ == "__main__":
    main(*sys.argv[1:])
