"""How long training takes where the next rollouts are sampled meanwhile: a real vLLM server on the CPU.

    make .venv-vllm/.installed
    .venv-vllm/bin/python -m benchmarks.async_speed

A tiny policy has learnt to search twice and then to answer. A search takes 0.5 to 1 s; with stragglers, three of a
hundred take ten. An optimizer step takes a second more than it would: a GPU that trains, and takes no core. Each case
trains on 24 rollouts of 16 trajectories, two updates each, after one run that warms everything up. Cases are
interleaved. Writes `async.json` and `async.md` in `benchmarks/results`;
docs/pictures.py draws who samples, who trains and who waits.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from datasets import Dataset
from examples.quickstart import PROTOCOL
from tests.agents import LIMITS, NAMES, agent_tokenizer, teach
from transformers import LlamaForCausalLM

from benchmarks.common import QUIET, RESULTS, Row, table, write_rows
from sorl_trl import SearchRollout, SOGRPOConfig, SOGRPOTrainer
from sorl_trl.command_line import Parser, at_least, run_command
from sorl_trl.trainers.late_rollouts import RolloutsAhead
from sorl_trl.types import Passage

FILE = RESULTS / "async.json"
SEARCH_S, STRAGGLER_S, STRAGGLERS, TRAINING_S = (0.5, 1.0), 10.0, 0.03, 1.0
ROLLOUTS, WINDOW = 24, 64
CASES: list[dict[str, Any]] = [
    {"staleness": 0, "order": "dataset", "stragglers": False},
    {"staleness": 1, "order": "dataset", "stragglers": False},
    {"staleness": 2, "order": "dataset", "stragglers": False},
    {"staleness": 0, "order": "dataset", "stragglers": True},
    {"staleness": 2, "order": "dataset", "stragglers": True},
    {"staleness": 2, "order": "completed", "stragglers": True},
    {"staleness": 4, "order": "completed", "stragglers": True},
]


class SlowSearch:
    """Answers from a dictionary, and takes a random time."""

    thread_safe = True

    def __init__(self, stragglers: bool) -> None:
        self._random, self._share = random.Random(0), STRAGGLERS if stragglers else 0.0

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        time.sleep(STRAGGLER_S if self._random.random() < self._share else self._random.uniform(*SEARCH_S))
        return [[Passage("0", "", f"where {query}")] for query in queries]


def taught_policy(folder: Path) -> Path:
    """One that searches twice for whatever it is asked, and whose attention vLLM's kernels can compute."""
    from tests.vllm.policies import save_policy

    tokenizer = agent_tokenizer()
    save_policy(folder, tokenizer, positions=WINDOW)
    policy = LlamaForCausalLM.from_pretrained(folder)
    known = NAMES[:4]
    scripts = [
        f"where {name} <search> {name} </search> <information> where {name} </information> <search> {other} </search> "
        f"<information> where {other} </information> <answer> {other} </answer>"
        for name in known
        for other in known
    ]
    teach(policy, tokenizer, scripts)
    policy.save_pretrained(folder)
    return folder


def train(policy: Path, url: str, folder: Path, case: dict[str, Any], rollouts: int) -> dict[str, Any]:
    """One run: its row, with the times at which parts were sampled and steps were made."""
    torch.manual_seed(0)
    arguments = SOGRPOConfig(
        str(folder / "out"),
        **QUIET,
        **{"per_device_train_batch_size": 8, "steps_per_generation": 2, "num_generations": 4},
        **{"max_steps": 2 * rollouts, "max_completion_length": 48, "learning_rate": 1e-5, "logging_steps": 1},
        **{"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url},
        **{"async_staleness": case["staleness"], "async_order": case["order"]},
    )
    rows = [{"prompt": f"where {NAMES[i % 4]}", "golden_answers": [NAMES[i % 4]]} for i in range(64)]
    trainer = SOGRPOTrainer(
        LlamaForCausalLM.from_pretrained(policy),
        lambda completion_ids, **_: [float(sum(ids) % 2) for ids in completion_ids],
        arguments,
        Dataset.from_list(rows),
        processing_class=agent_tokenizer(),
        rollout_func=SearchRollout(SlowSearch(case["stragglers"]), PROTOCOL, LIMITS),
    )
    spans: dict[str, list[tuple[float, float]]] = {"samples": [], "trains": [], "waits": []}
    began = time.perf_counter()

    def timed(kind: str, function: Any, more: float = 0.0) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            start = time.perf_counter() - began
            result = function(*given, **named)
            time.sleep(more)
            spans[kind].append((start, time.perf_counter() - began))
            return result

        return run

    trainer.training_step = timed("trains", trainer.training_step, TRAINING_S)
    if case["staleness"]:
        collect, wait = SearchRollout.collect, RolloutsAhead._wait_for_parts
        SearchRollout.collect = timed("samples", collect)
        RolloutsAhead._wait_for_parts = timed("waits", wait)
        try:
            trainer.train()
        finally:
            SearchRollout.collect, RolloutsAhead._wait_for_parts = collect, wait
    else:
        trainer.rollout_func = timed("samples", trainer.rollout_func)
        trainer.train()
    wall = time.perf_counter() - began
    logs = trainer.state.log_history
    found = {
        name: [log[f"async/{name}"] for log in logs if f"async/{name}" in log] for name in ("age_mean", "age_max")
    }
    trained = sum("reward" in log for log in logs)
    return {
        "mode": "asynchronous" if case["staleness"] else "synchronous",
        **case,
        "engine": "vllm serve",
        "search_ms": [int(1000 * each) for each in SEARCH_S],
        "rollouts": trained,
        "dropped": rollouts - trained,
        "wall_seconds": wall,
        "waited_seconds": sum(end - start for start, end in spans["waits" if case["staleness"] else "samples"]),
        "age_mean": statistics.mean(found["age_mean"]) if case["staleness"] else 0.0,
        "age_max": max(found["age_max"], default=0.0),
        "load": os.getloadavg()[0],
        "spans": spans,
    }


def write(rows: list[Row]) -> None:
    write_rows(rows, FILE)
    FILE.with_suffix(".md").write_text(report(rows))


HEADER = f"""# What sampling ahead saves

{ROLLOUTS} rollouts of 16 trajectories from a vLLM server on the CPU, searches of 0.5 to 1 s, two updates of a second
each: medians over repeats. *Faster* is against synchronous training with the same searches."""
COLUMNS = (
    *("searches", "staleness", "order", "runs", "seconds", "faster", "waited", "mean age", "largest age", "dropped"),
)


def report(rows: list[Row]) -> str:
    lines = []
    runs = [row for row in rows if "rollouts" in row]
    for case in CASES:
        of = [row for row in runs if all(row[name] == value for name, value in case.items())]
        alike = [row for row in runs if row["mode"] == "synchronous" and row["stragglers"] == case["stragglers"]]
        if of and alike:
            wall, base = (statistics.median(row["wall_seconds"] for row in each) for each in (of, alike))
            searches = "3 % of ten seconds" if case["stragglers"] else "even"
            cells = [searches, case["staleness"], case["order"], len(of), f"{wall:.1f}", f"{base / wall:.2f}"]
            cells += [f"{statistics.median(row['waited_seconds'] for row in of):.1f}"]
            cells += [f"{statistics.median(row['age_mean'] for row in of):.2f}"]
            cells += [f"{max(row['age_max'] for row in of):.0f}", sum(row["dropped"] for row in of)]
            lines.append([*map(str, cells)])
    return f"{HEADER}\n\n{table(COLUMNS, lines)}\n"


def main(words: Sequence[str]) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=at_least(1), default=2, help="runs of each case")
    parser.add_argument("--rollouts", type=at_least(2), default=ROLLOUTS, help="rollouts of each run")
    arguments = parser.parse_args(words)
    from tests.vllm import shims
    from tests.vllm.servers import serving

    os.environ.update(shims.ENVIRONMENT)
    shims.install()
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        policy = taught_policy(folder / "policy")
        with serving(policy, WINDOW, folder / "server.txt") as server:
            train(policy, server.url, folder, CASES[2], 2)
            for _ in range(arguments.rounds):
                for case in CASES:
                    row = train(policy, server.url, folder, case, arguments.rollouts)
                    rows.append(row)
                    print({key: value for key, value in row.items() if key != "spans"}, flush=True)
    write(rows)


if __name__ == "__main__":
    sys.exit(run_command(main))
