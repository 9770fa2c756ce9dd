"""How long training takes where the next rollouts are sampled meanwhile: a real vLLM server on the CPU.

    make .venv-vllm/.installed model
    .venv-vllm/bin/python -m benchmarks.async_speed
    .venv-vllm/bin/python -m benchmarks.async_speed --sync models/smollm2-135m
    .venv/bin/python -m benchmarks.async_speed --draw

A tiny policy has learnt to search twice and then to answer. A search takes 0.5 to 1 s; with stragglers, three of a
hundred take ten. An optimizer step takes a second more than it would: a GPU that trains, and takes no core. Each case
trains on 24 rollouts of 16 trajectories, two updates each, after one run that warms everything up. Cases are
interleaved. `--sync` measures how long a model's weights take. Writes `async.json`, `async.md` and the picture of
docs/async.md (who samples, who trains, who waits), in `benchmarks/results`.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1"}

import torch
from datasets import Dataset
from examples.quickstart import PROTOCOL
from tests.agents import LIMITS, NAMES, agent_tokenizer, teach
from transformers import LlamaForCausalLM

from sorl_trl import SearchRollout, SOGRPOConfig, SOGRPOTrainer
from sorl_trl.agents.vllm_server import VLLMServer
from sorl_trl.command_line import Parser, at_least, run_command
from sorl_trl.trainers.late_rollouts import RolloutsAhead
from sorl_trl.types import Passage

FILE = Path(__file__).parent / "results" / "async.json"
PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "async.png"
SEARCH_S, STRAGGLER_S, STRAGGLERS, TRAINING_S = (0.5, 1.0), 10.0, 0.03, 1.0
ROLLOUTS, WINDOW, SYNCS, SYNC_WINDOW = 24, 64, 5, 512
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
    """Answers from a dictionary, and takes as long as its random numbers say."""

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
        **{"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True},
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


def sync(model: Path, folder: Path) -> dict[str, Any]:
    """Seconds until a server has new weights: where it is idle, and where a turn goes on with them."""
    from tests.vllm.policies import wrap
    from tests.vllm.servers import serving

    def timed() -> float:
        began = time.perf_counter()
        trls.sync_weights()
        return time.perf_counter() - began

    with serving(model, SYNC_WINDOW, folder / "server.txt") as served:
        trls, server = wrap(model, mode="server", server_base_url=served.url), VLLMServer(served.url)
        idle = [timed() for _ in range(SYNCS)]
        long = {"model": server.model[0], "prompt": [1], "max_tokens": SYNC_WINDOW - 1, "ignore_eos": True}
        turn = threading.Thread(target=server.ask, args=("POST", "/v1/completions", long), daemon=True)
        turn.start()
        time.sleep(2.0)
        busy = [timed() for _ in range(SYNCS)]
        assert turn.is_alive(), "the turn has ended too early"
    facts = {"mode": "weights", "model": model.name, "parameters": trls.model.num_parameters()}
    return {**facts, "idle_seconds": idle, "busy_seconds": busy, "load": os.getloadavg()[0]}


def write(found: list[dict[str, Any]]) -> None:
    """Put rows into the file, in the place of those of the same modes."""
    from benchmarks import async_scale

    modes = {row["mode"] for row in found}
    rows = [row for row in json.loads(FILE.read_text()) if row["mode"] not in modes] + found
    FILE.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    sent = "".join(sync_line(row) for row in rows if row["mode"] == "weights")
    FILE.with_suffix(".md").write_text("\n".join([table(rows), sent, async_scale.table(rows)]))


def sync_line(row: dict[str, Any]) -> str:
    seconds = (statistics.median(row[f"{name}_seconds"]) for name in ("idle", "busy"))
    medians = "{:.1f} s, {:.1f} s with a turn under way".format(*seconds)
    return f"- Sending the weights of {row['model']}: {medians} (medians of {SYNCS}, load {row['load']:.0f}).\n"


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "# What sampling ahead saves",
        "",
        f"{ROLLOUTS} rollouts of 16 trajectories from a vLLM server on the CPU, searches of 0.5 to 1 s, two updates "
        "of a second each: medians over repeats. *Faster* is against synchronous training with the same searches.",
        "",
        "| searches | staleness | order | runs | seconds | faster | waited | mean age | largest age | dropped |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows = [row for row in rows if "rollouts" in row]
    for case in CASES:
        of = [row for row in rows if all(row[name] == value for name, value in case.items())]
        alike = [row for row in rows if row["mode"] == "synchronous" and row["stragglers"] == case["stragglers"]]
        if not of or not alike:
            continue
        wall, base = (statistics.median(row["wall_seconds"] for row in each) for each in (of, alike))
        searches = "3 % of ten seconds" if case["stragglers"] else "even"
        lines.append(
            f"| {searches} | {case['staleness']} | {case['order']} | {len(of)} "
            f"| {wall:.1f} | {base / wall:.2f} | {statistics.median(row['waited_seconds'] for row in of):.1f} "
            f"| {statistics.median(row['age_mean'] for row in of):.2f} | {max(row['age_max'] for row in of):.0f} "
            f"| {sum(row['dropped'] for row in of)} |"
        )
    return "\n".join(lines) + "\n"


def draw(rows: list[dict[str, Any]]) -> None:
    """Timelines of the last run of three cases."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chosen = [CASES[0], CASES[2], CASES[5]]
    runs = [row for row in rows if "spans" in row]
    last = [[row for row in runs if all(row[k] == v for k, v in case.items())][-1:] for case in chosen]
    found = [each[0] for each in last if each]
    placed = [lanes_of(row["spans"]["samples"]) for row in found]
    heights = [3 + max(lane for lane, _ in each) for each in placed]
    size = {"figsize": (9, 0.25 * sum(heights) + 2), "gridspec_kw": {"height_ratios": heights}}
    figure, axes = pyplot.subplots(len(found), 1, sharex=True, squeeze=False, **size)
    colours = {"samples": "#1f77b4", "trains": "#2ca02c", "waits": "#d62728"}
    for axis, row, lanes in zip(axes[:, 0], found, placed, strict=True):
        for lane, (start, end) in lanes:
            axis.broken_barh([(start, end - start)], (2 + lane, 0.8), color=colours["samples"], linewidth=0)
        spans = row["spans"]
        stood = spans["waits"] if row["staleness"] else spans["samples"]
        # A training step begins with its rollout, or by waiting for it.
        trains = [(max([start, *(e for s, e in stood if start <= s <= end)]), end) for start, end in spans["trains"]]
        for place, kind, bars in ((1, "trains", trains), (0, "waits", spans["waits"])):
            widths = [(start, end - start) for start, end in bars]
            axis.broken_barh(widths, (place, 0.8), color=colours[kind], linewidth=0)
        axis.set_yticks([0.4, 1.4, 2.4], ["waits", "trains", "samples"])
        name = f"staleness {row['staleness']}, order {row['order']}" if row["staleness"] else "synchronous"
        axis.set_title(name + (", stragglers" if row["stragglers"] else ""), loc="left", fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


def lanes_of(spans: list[tuple[float, float]]) -> list[tuple[int, tuple[float, float]]]:
    """Each span with a lane in which it overlaps no other."""
    free, placed = list[float](), []
    for start, end in sorted(spans):
        lane = next((i for i, until in enumerate(free) if until <= start), len(free))
        free[lane : lane + 1] = [end]
        placed.append((lane, (start, end)))
    return placed


def main(words: Sequence[str]) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=at_least(1), default=2, help="runs of each case")
    parser.add_argument("--rollouts", type=at_least(2), default=ROLLOUTS, help="rollouts of each run")
    parser.add_argument("--sync", type=Path, metavar="MODEL", help="only send a model's weights; its folder")
    parser.add_argument("--draw", action="store_true", help="draw the last runs again; needs matplotlib")
    arguments = parser.parse_args(words)
    if arguments.draw:
        draw(json.loads(FILE.read_text()))
        return
    from tests.vllm import shims
    from tests.vllm.servers import serving

    os.environ.update(shims.ENVIRONMENT)
    shims.install()
    rows: list[dict[str, Any]] = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.sync:
            write([sync(arguments.sync, folder)])
            return
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
