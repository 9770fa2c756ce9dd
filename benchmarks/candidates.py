"""Do candidates for turns pay? Questions of one hop or two, a tiny policy, and as many sampled tokens in every arm.

python -m benchmarks.candidates --prepare        # worlds and policies, in runs/candidates, which may be carried
python -m benchmarks.candidates --processes 16   # the runs that are not there yet, a file each, and the report
python -m benchmarks.candidates --report         # only writes benchmarks/results/candidates.md and .json
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.common import RESULTS, Row, table, write_rows
from benchmarks.stability import in_parallel
from benchmarks.stability_plan import GROUP, SHORT, BenchmarkMethod, Regime
from benchmarks.stability_run import GREEDY, SAMPLED, Examiner, prepare, trainer_of
from sorl_trl.command_line import Parser, at_least, run_command
from sorl_trl.files import write_whole
from sorl_trl.methods import METHODS, SETTINGS
from sorl_trl.qa import exact_match
from sorl_trl.rollout import BestOfTurns, Reply
from sorl_trl.trainers.checks import policy_rollout_of
from sorl_trl.types import ActionKind, Turn

FOLDER = Path("runs/candidates")
SEEDS = (201, 202, 203, 204, 205)
TOKENS = 25_000  # a run ends with the rollout that reaches this, discarded candidates included


def usefulness(example: Mapping[str, Any], turn: Turn, reply: Reply | None) -> float:
    """0 for a right answer, and for a search whose passage holds it, which only training knows; below 0 otherwise."""
    # Were finding it rewarded, finding it again would beat giving it. A wrong answer costs more than all searches.
    golden = example["golden_answers"]
    if turn.action.kind is ActionKind.ANSWER:
        return 0.0 if exact_match(turn.action.content, golden) else -4.0
    texts = [passage.text.lower() for passage in reply.passages] if reply else []
    return 0.0 if any(gold.lower() in text for gold in golden for text in texts) else -1.0


ARMS = {
    "plain": (f"plain, groups of {GROUP}", BestOfTurns(1, usefulness), GROUP),
    "groups": (f"plain, groups of {4 * GROUP}", BestOfTurns(1, usefulness), 4 * GROUP),
    "greedy": ("best of 4 turns", BestOfTurns(4, usefulness), GROUP),
    "beam": ("beam of 2 paths, 4 turns after each", BestOfTurns(4, usefulness, width=2), GROUP),
}
"""By name: title, candidates (a single one is the plain rollout, with a budget), trajectories of a prompt."""


class Budget(TrainerCallback):
    """Counts what rollouts take, and ends the run once they have taken `TOKENS`."""

    def __init__(self, regime: Regime) -> None:
        self._regime, self.spent = regime, {"tokens sampled": 0.0, "environment steps": 0.0}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        for name in self.spent:
            self.spent[name] += logs.get(f"rollout/{name.replace(' ', '_')}", 0.0) * self._regime.trajectories

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        ends_rollout = state.global_step % self._regime.updates == 0
        control.should_training_stop = ends_rollout and self.spent["tokens sampled"] >= TOKENS


def run(name: str, seed: int) -> None:
    """Train an arm with 8 updates on each rollout, and write what it ends with."""
    torch.set_num_threads(1)
    _, candidates, group = ARMS[name]
    regime = Regime("", "", 1e-3, world=SHORT, trajectories=8 * group, minibatch=2 * group, rollouts=1000)
    method = BenchmarkMethod(name, "so_grpo", SETTINGS["so_grpo"] | {"num_generations": group}, METHODS["so_grpo"])
    folder, budget = prepare(SHORT, seed, FOLDER), Budget(regime)
    with tempfile.TemporaryDirectory() as output:
        trainer = trainer_of(regime, method, folder, {"output_dir": output, "seed": seed, "learning_rate": 1e-3})
        policy_rollout_of(trainer).candidates = candidates
        trainer.remove_callback(Examiner)
        trainer.add_callback(budget)
        score = SHORT.examination(folder, trainer.processing_class)
        start = examined(trainer.model, score)["sampled EM"]
        trainer.train()
    row = {"arm": name, "seed": seed, "start": start, **examined(trainer.model, score), **budget.spent}
    equal = [entry["frac_reward_zero_std"] for entry in trainer.state.log_history if "frac_reward_zero_std" in entry]
    row |= {"rollouts": len(equal), "share in groups of equal rewards": statistics.fmean(equal)}
    write_whole(FOLDER / f"{name}-{seed}.json", json.dumps(row).encode())


@torch.no_grad()
def examined(model: Any, score: Any) -> dict[str, float]:
    """Exact match on questions about an unseen world, without candidates."""
    model.eval()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        sampled = statistics.fmean(score(model, SAMPLED) for _ in range(4))
        return {"sampled EM": sampled, "greedy EM": score(model, GREEDY)}


HEADER = f"""# Do candidates for turns pay at equally many sampled tokens?

Written by `python -m benchmarks.candidates`. A policy of 131,200 parameters learns to answer questions of one hop or
two with SO-GRPO, 8 prompts and 8 updates per rollout, and a learning rate of 1e-3, until {TOKENS:,} tokens are
sampled, those of discarded candidates included. Candidates are scored with the right answer, which only training
knows. Exact match (EM) is that of the policy without candidates, about another world. Mean ± standard error."""
COLUMNS = {"sampled EM": ".3f", "greedy EM": ".3f", "tokens sampled": ",.0f", "environment steps": ",.0f"}
COLUMNS |= {"rollouts": ".1f", "share in groups of equal rewards": ".2f"}


def report(rows: Sequence[Row]) -> str:
    lines = []
    for name, (title, *_) in ARMS.items():
        of = [row for row in rows if row["arm"] == name]
        means = [_mean([row[key] for row in of], form) for key, form in COLUMNS.items()]
        lines.append([title, *means, " ".join(f"{row['sampled EM']:.3f}" for row in of)])
    start = _mean([row["start"] for row in rows], ".3f")
    compared = table(["arm", *COLUMNS, "sampled EM of each seed"], lines, 1)
    return f"{HEADER}\n\nAll arms start from a sampled EM of {start}.\n\n{compared}"


def _mean(values: Sequence[float], form: str) -> str:
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):{form}} ± {error:{form}}" if values else "–"


def main(words: Sequence[str]) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--prepare", action="store_true", help="only make worlds and policies")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--processes", type=at_least(1), default=1, help="runs at a time, of one thread each")
    arguments = parser.parse_args(words)
    files = {(name, seed): FOLDER / f"{name}-{seed}.json" for seed, name in product(SEEDS, ARMS)}
    if not arguments.report:
        in_parallel(prepare, [(SHORT, seed, FOLDER) for seed in SEEDS], arguments.processes, "Worlds and policies")
    if not (arguments.report or arguments.prepare):
        missing = [job for job, file in files.items() if not file.is_file()]
        in_parallel(run, missing, arguments.processes, "Runs")
    if not arguments.prepare:
        rows = [json.loads(file.read_text()) for file in files.values() if file.is_file()]
        write_rows(rows, RESULTS / "candidates.json")
        (RESULTS / "candidates.md").write_text(report(rows))


if __name__ == "__main__":
    sys.exit(run_command(main))
