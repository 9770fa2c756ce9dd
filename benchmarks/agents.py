"""Do agents that share a policy learn better if each is compared with itself alone, as in Dr. MAS?

    python -m benchmarks.agents --prepare        # worlds and policies of all seeds, in runs/agents/worlds
    python -m benchmarks.agents --processes 16   # trains: a file of runs/agents/runs for each run
    python -m benchmarks.agents --report         # writes benchmarks/results/agents.md and .json

A verifier, a searcher and an answerer (examples/search_team.py) are turns of one policy, which has imitated a scripted
team that makes mistakes. It is trained in one invented world, and judged in another. Runs that are there are not
repeated. Once the worlds are prepared, the folder may be carried to another machine.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import RESULTS, Row, table, write_rows
from benchmarks.stability_plan import BenchmarkMethod, Regime
from benchmarks.stability_report import LAST, Run
from benchmarks.stability_run import evaluations_of, prepare, summarize_rollouts, train, trainer_of
from benchmarks.worlds.team import TeamWorld
from sorl_trl.command_line import Parser, at_least, run_command
from sorl_trl.files import write_whole
from sorl_trl.methods import SETTINGS, AgentWise, Method

FOLDER = Path(__file__).parents[1] / "runs/agents"
FILE = RESULTS / "agents.json"
SEEDS = (501, 502, 503, 504, 505)
"""None of them chose a setting."""
AGENTS = ("verifier", "searcher", "answerer")
ARMS = {
    "grpo": ("μ, σ, a vote per trajectory (GRPO)", AgentWise("group", "group", "trajectory")),
    "turns": ("μ, σ, a vote per turn", AgentWise("group", "group")),
    "mean": ("μ_a, σ, a vote per turn", AgentWise("agent", "group")),
    "spread": ("μ, σ_a, a vote per turn", AgentWise("group", "agent")),
    "dr_mas": ("μ_a, σ_a, a vote per turn (Dr. MAS)", AgentWise()),
}
"""The first and the last are what the paper's public code compares; the second tells votes from statistics."""
WORLD = TeamWorld()
REGIMES = {
    "gentle": Regime("Gentle", "8 updates per rollout, at a learning rate of 3e-4", 3e-4, world=WORLD, rollouts=16),
    "reuse": Regime("Reuse", "32 updates per rollout, at 1e-3", 1e-3, world=WORLD, epochs=8, rollouts=8),
}
Key = tuple[str, str, int]
"""Regime, arm and seed."""
HEADER = """# Agents that share a policy, compared with themselves alone

Written by `python -m benchmarks.agents`: three agents of one policy of {parameters:,} parameters, in a search task;
mean ± standard error over {seeds} seeds. EM is the exact match in a world of other facts, over the last {last}
rollouts; the policies that the runs start from have a sampled EM of {start:.2f}. Searches are those of a trajectory,
over the same rollouts. Gradient norms are means over all updates, of each agent's part of a micro-batch's gradient.
NaN counts the updates whose loss or gradient was not finite, of all seeds, and fallen the runs that ended below their
start or below half of their best."""


def file_of(folder: Path, key: Key) -> Path:
    return folder / "runs" / f"{'-'.join(map(str, key))}.json"


def run(folder: Path, key: Key) -> Key:
    """Train, and write what became of it. A run whose weights become NaN has an `error`."""
    regime, (title, credit), seed = REGIMES[key[0]], ARMS[key[1]], key[2]
    world = prepare(WORLD, seed, folder / "worlds")
    began = time.process_time()
    with TemporaryDirectory() as output:
        method = BenchmarkMethod(title, "so_grpo", SETTINGS["dr_mas"], Method(credit))
        own = {"output_dir": output, "seed": seed, "learning_rate": regime.learning_rate, "log_agent_gradients": True}
        trainer = trainer_of(regime, method, world, own)
        error = train(trainer)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    record = {
        **{"regime": key[0], "arm": key[1], "seed": seed, "error": error},
        "seconds": round(time.process_time() - began, 1),
        "parameters": trainer.model.num_parameters(),
        "evaluations": evaluations_of(trainer),
        "nan_updates": sum(not math.isfinite(entry["loss"] + entry["grad_norm"]) for entry in log),
        "rollouts": summarize_rollouts(log, regime.updates),
    }
    write_whole(file_of(folder, key), json.dumps(record).encode())
    return key


def summary_of(record: Row) -> Row:
    """A run's entry in the report."""
    found, rollouts = Run(record), record["rollouts"]
    searches = [
        (each.get("agents/searcher/turn_share") or 0.0) * (each["turns/per_trajectory"] or 0.0)
        for each in rollouts[-LAST:]
    ]
    norms = {name: [each.get(f"agents/{name}/grad_norm") or 0.0 for each in rollouts] for name in AGENTS}
    return {
        **{name: record[name] for name in ("regime", "arm", "seed", "parameters", "seconds", "nan_updates")},
        **{"start": found.start, "fallen": found.collapsed},
        **{name: found.final(name) for name in ("sampled_em", "greedy_em")},
        "searches": statistics.fmean(searches),
        **{name: statistics.fmean(values) for name, values in norms.items()},
    }


def report(rows: Sequence[Row]) -> str:
    """The header and a table for each regime."""
    start = statistics.fmean(row["start"] for row in rows)
    seeds = len({row["seed"] for row in rows})
    parts = [HEADER.format(parameters=rows[0]["parameters"], seeds=seeds, last=LAST, start=start)]
    measured = {"sampled_em": "sampled EM", "greedy_em": "greedy EM", "searches": "searches"}
    measured |= {name: f"gradient, {name}" for name in AGENTS}
    for name, regime in REGIMES.items():
        lines = []
        for arm, (title, _) in ARMS.items():
            own = [row for row in rows if (row["regime"], row["arm"]) == (name, arm)]
            if own:
                cells = [_with_error([row[each] for row in own]) for each in measured]
                counts = (sum(row[each] for row in own) for each in ("nan_updates", "fallen"))
                lines.append([title, str(len(own)), *cells, *map(str, counts)])
        columns = ["compared with", "seeds", *measured.values(), "NaN", "fallen"]
        parts.append(f"## {regime.title}: {regime.description}\n\n{table(columns, lines, left=1).strip()}")
    return "\n\n".join(parts) + "\n"


def _with_error(values: Sequence[float]) -> str:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):.3f} ± {error:.3f}"


def main(words: Sequence[str]) -> None:
    parser = Parser(prog="python -m benchmarks.agents", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of worlds and runs (default: runs/agents)")
    parser.add_argument("--processes", type=at_least(1), default=1, help="how many run at a time")
    parser.add_argument("--prepare", action="store_true", help="only make worlds and policies")
    parser.add_argument("--report", action="store_true", help="only write the report, of the runs that are there")
    given = parser.parse_args(words)
    keys = [key for key in product(REGIMES, ARMS, SEEDS) if not file_of(given.folder, key).is_file()]
    if not given.report:
        (given.folder / "runs").mkdir(parents=True, exist_ok=True)
        os.environ["OMP_NUM_THREADS"] = "1"
        with ProcessPoolExecutor(given.processes, get_context("spawn")) as pool:
            for made in [pool.submit(prepare, WORLD, seed, given.folder / "worlds") for seed in SEEDS]:
                made.result()
            for done in as_completed([] if given.prepare else [pool.submit(run, given.folder, key) for key in keys]):
                print(*done.result(), flush=True)
        return
    records = [json.loads(path.read_text()) for path in sorted((given.folder / "runs").glob("*.json"))]
    rows = [summary_of(record) for record in records]
    write_rows(rows, FILE)
    FILE.with_suffix(".md").write_text(report(rows))


if __name__ == "__main__":
    sys.exit(run_command(main))
