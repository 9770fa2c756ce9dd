"""Does routing replay keep a mixture of experts close to the engine that sampled, and stable?

    python -m benchmarks.routing --prepare    # worlds and warm-started policies: minutes
    python -m benchmarks.routing              # every run that is not there yet, 10 to 60 s each on one core
    python -m benchmarks.routing --report     # only writes benchmarks/results/routing.md again

The policy is a Mixtral of 8 experts, 2 to a token. The engine that samples has its weights, but differs: its
routers choose by noisy logits, or it computes in bfloat16. A rollout of 64 trajectories serves 1, 4 or 16 updates.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.common import RESULTS, Row, table, write_rows
from benchmarks.stability import in_parallel
from benchmarks.stability_plan import BenchmarkMethod, Regime
from benchmarks.stability_report import LAST
from benchmarks.stability_run import TRAINERS, evaluations_of, train, trainer_of
from benchmarks.worlds.mixture import ENGINES, NOISE, WORLDS
from sorl_trl import SOGRPOConfig, SOGRPOTrainer
from sorl_trl.command_line import Parser, at_least, run_command
from sorl_trl.files import write_whole
from sorl_trl.methods import METHODS, SETTINGS

RUNS = Path(__file__).parents[1] / "runs/routing"
SEEDS = range(40, 45)
REPLAYS, UPDATES = ("none", "r2", "r3"), (1, 4, 16)


@dataclass(frozen=True)
class Job:
    engine: str
    updates: int
    replay: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.updates}-{self.replay}-{self.seed}"


JOBS = [
    Job(engine, updates, replay, seed)
    for seed, engine, updates, replay in product(SEEDS, ENGINES, UPDATES, REPLAYS)
    if (updates, replay) != (1, "r2")  # one update has nothing to replay
]


class MeasuredTrainer(SOGRPOTrainer):
    """Logs how far the log-probabilities of the old policy, replayed if at all, are from the engine's."""

    def _apply_method(self, rollout: Any) -> Any:
        batch, old = rollout.batch, rollout.old_logps
        old = self._score(self.model, batch, replay=True).logps if old is None else old
        self._log("gap", (old - batch["sampling_per_token_logps"]).abs(), batch["turn_ids"] >= 0)
        return super()._apply_method(rollout)


TRAINERS["measured"] = MeasuredTrainer, SOGRPOConfig


def prepare(seed: int) -> None:
    torch.set_num_threads(1)
    WORLDS["noise"].prepare(seed, RUNS)


def run(job: Job) -> None:
    """Train and evaluate, and write the file of the run. Weights that become NaN count as fallen."""
    torch.set_num_threads(1)
    sizes = {"trajectories": 64, "minibatch": 64 // min(job.updates, 4), "epochs": max(job.updates // 4, 1)}
    regime = Regime("", "", 1e-3, world=WORLDS[job.engine], rollouts=20, **sizes)
    settings = SETTINGS["grpo"] | {"router_replay": job.replay, "router_aux_loss_coef": 0.0}
    method = BenchmarkMethod(job.replay, "measured", settings, METHODS["grpo"])
    own = {"seed": job.seed, "learning_rate": regime.learning_rate, "log_turn_details": True}
    with TemporaryDirectory() as output:
        folder = WORLDS["noise"].prepare(job.seed, RUNS)
        trainer = trainer_of(regime, method, folder, own | {"output_dir": output})
        error = train(trainer)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    curve = evaluations_of(trainer)

    def mean(name: str) -> float | None:
        found = [entry[name] for entry in log if not math.isnan(entry.get(name) or math.nan) or entry.get(name) == 0]
        return statistics.fmean(found) if found else None

    row = {
        **{"engine": job.engine, "updates": job.updates, "replay": job.replay, "seed": job.seed, "error": error},
        **{"start": curve[0]["sampled_em"], "parameters": trainer.model.num_parameters()},
        **{name: statistics.fmean(each[name] for each in curve[-LAST:]) for name in ("sampled_em", "greedy_em")},
        **{"gap": mean("gap"), "rerouted": mean("router_replay/rerouted"), "kl": mean("kl_to_old")},
        **{"grad_norm": max(entry["grad_norm"] for entry in log), "clipped": mean("clip_fraction/token")},
    }
    write_whole(RUNS / f"{job.name}.json", json.dumps(row).encode())


COLUMNS = {
    **{"sampled_em": "sampled EM", "greedy_em": "greedy EM", "gap": "gap", "rerouted": "rerouted"},
    **{"kl": "KL", "clipped": "clipped", "grad_norm": "largest gradient"},
}
HEADER = """# Routing replay

Written by `python -m benchmarks.routing`. A mixture of {parameters:,} parameters (8 experts, 2 to a token) is trained
by GRPO without a target KL, at a learning rate of 1e-3. The engine that samples has its weights, but its routers
choose by logits with noise of a standard deviation of {noise}, or it computes in bfloat16. A rollout of 64
trajectories serves 1, 4 or 16 updates. All arms start from a sampled EM of {start:.3f}.

Mean ± standard error over seeds {seeds}. EM is exact match on an unseen world, the mean of the last {last}
evaluations. The gap is the mean |log π_old − log μ| of the policy's tokens, in nats, replayed if at all; *rerouted* is
the share of tokens whose replayed experts the policy would not have chosen. Runs below their start have fallen."""


def report(rows: Sequence[Row]) -> str:
    """`routing.md`."""
    lines = []
    for engine, updates, replay in product(ENGINES, UPDATES, REPLAYS):
        of_arm = [row for row in rows if (row["engine"], row["updates"], row["replay"]) == (engine, updates, replay)]
        if not of_arm:
            continue
        fallen = sum(row["error"] is not None or row["sampled_em"] < row["start"] for row in of_arm)
        cells = []
        for name in COLUMNS:
            found = [row[name] for row in of_arm if row[name] is not None]
            error = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0.0
            cells.append(f"{statistics.fmean(found):.3g} ± {error:.2g}" if found else "–")
        each = " ".join(f"{row['sampled_em']:.2f}" for row in of_arm)
        lines.append([engine, str(updates), replay, *cells, f"{fallen} of {len(of_arm)}", each])
    names = ["engine", "updates", "replay", *COLUMNS.values(), "fallen", "sampled EM of each seed"]
    start = statistics.fmean(row["start"] for row in rows)
    said = {"parameters": rows[0]["parameters"], "noise": NOISE, "start": start, "last": LAST}
    header = HEADER.format(**said, seeds=f"{SEEDS.start} to {SEEDS.stop - 1}")
    return f"{header}\n\n{table(names, lines, 3)}"


def main(words: Sequence[str]) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prepare", action="store_true", help="make worlds and policies alone")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--processes", type=at_least(1), default=os.cpu_count() or 1, help="runs at a time")
    arguments = parser.parse_args(words)
    RUNS.mkdir(parents=True, exist_ok=True)
    if not arguments.report:
        in_parallel(prepare, [(seed,) for seed in SEEDS], arguments.processes, "Worlds and policies")
    if not (arguments.report or arguments.prepare):
        todo = [job for job in JOBS if not (RUNS / f"{job.name}.json").is_file()]
        in_parallel(run, [(job,) for job in todo], arguments.processes, "Routing replay")
    if not arguments.prepare:
        rows = [json.loads(path.read_text()) for path in sorted(RUNS.glob("*.json"))]
        write_rows(rows, RESULTS / "routing.json")
        (RESULTS / "routing.md").write_text(report(rows))


if __name__ == "__main__":
    sys.exit(run_command(main))
