"""What a rollout and its updates cost with each method, in CPU time and beside GRPO's: ratios on one machine.

    python -m benchmarks.method_cost     # five minutes of one core that has nothing else to do

Each method trains a few rollouts of the stability benchmark's *reuse* and *hunts, reuse*, from the same policy,
without examinations. GRPO runs before every few methods, and each is compared with the GRPO run before it. A policy
that collapses writes other trajectories, so the learning rate is a small one, at which none does. Writes
`benchmarks/results/method_cost.json`, which `python -m benchmarks.method_pages` makes a column of.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import TrainerCallback

from benchmarks import stability  # sets the environment of a run
from benchmarks.other_methods import OTHER_METHODS
from benchmarks.stability_grid import CHOOSING_SEEDS
from benchmarks.stability_run import REGIMES, Examiner, Job, build_trainer, prepare, regime_of
from benchmarks.stability_statistics import published_grid
from sorl_trl.command_line import Parser, run_command

COSTS = stability.RESULTS / "method_cost.json"
COMPARED = ("reuse", "hunt-reuse")
BASELINE = "grpo"
BESIDES = ("so_grpo", "so_grpo_turn", "so_grpo_specified", "st_grpo", "gspo", "ppo", "so_ppo", "st_ppo")
LEARNING_RATE = 1e-5
ROLLOUTS = 3
"""Of which the first is not counted."""
EVERY = 4
"""Methods between two runs of the baseline."""


class Clock(TrainerCallback):
    """CPU seconds of this process at the end of each rollout's updates."""

    def __init__(self, updates: int) -> None:
        self._updates = updates
        self.ends: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self._updates == 0:
            self.ends.append(time.process_time())
        control.should_training_stop = len(self.ends) == ROLLOUTS


def seconds_per_rollout(method: str, regime: str, output: Path) -> float:
    """The median over the rollouts after the first."""
    job = Job(regime, method, LEARNING_RATE, CHOOSING_SEEDS[0])
    trainer = build_trainer(job, prepare(REGIMES[regime].world, job.seed, stability.RUNS), output)
    trainer.remove_callback(Examiner)
    clock = Clock(regime_of(job).updates)
    trainer.add_callback(clock)
    trainer.train()
    return statistics.median(later - sooner for sooner, later in zip(clock.ends, clock.ends[1:], strict=False))


def measure(regime: str) -> dict[str, float]:
    """Method to its seconds over those of the baseline right before it."""
    grid = published_grid()
    methods = [name for name in (*BESIDES, *OTHER_METHODS) if name in grid.methods_in(regime)]
    ratios, baseline = {}, 0.0
    for place, method in enumerate(tqdm(methods, desc=regime, unit="method")):
        with TemporaryDirectory() as folder:
            if place % EVERY == 0:
                baseline = seconds_per_rollout(BASELINE, regime, Path(folder) / BASELINE)
            ratios[method] = round(seconds_per_rollout(method, regime, Path(folder) / method) / baseline, 2)
    return ratios


def main(words: Sequence[str]) -> None:
    Parser(description=__doc__, formatter_class=RawDescriptionHelpFormatter).parse_args(words)
    torch.set_num_threads(1)
    stability.RUNS.mkdir(parents=True, exist_ok=True)
    costs = {regime: measure(regime) for regime in COMPARED}
    COSTS.write_text(json.dumps(costs, indent=1) + "\n")
    print(f"The ratios are in {COSTS}.")


if __name__ == "__main__":
    sys.exit(run_command(main))
