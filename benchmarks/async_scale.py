"""What sampling ahead saves with many rows and processes: the same pacing, with sleeps in the place of models.

    python -m benchmarks.async_scale

Each rank is a thread with a `RolloutsAhead` of its own. Rollouts, updates and sending weights are sleeps, ten times
shorter than `benchmarks.async_speed` has measured with 16 rows. That is the assumption: with more rows and ranks there
are as many more engines and trainers, so that nothing but waiting for the slowest row of all ranks grows.
"""

from __future__ import annotations

import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, product
from types import SimpleNamespace
from typing import Any

from trl.trainer.utils import RepeatSampler

from sorl_trl.agents.chat import RolloutSetup
from sorl_trl.command_line import Parser, run_command
from sorl_trl.rollout import RolloutLimits
from sorl_trl.trainers import late_rollouts, vllm_policy
from sorl_trl.trainers.late_rollouts import upcoming_batches

SIZES = ((16, 1), (32, 4), (64, 8))  # rows of a rank, and ranks
STALENESS = (0, 1, 2, 4)
KINDS = ((False, "dataset"), (True, "dataset"), (True, "completed"))  # whether some searches take long, and the order
SEARCH_S, STRAGGLER_S, STRAGGLERS = (0.5, 1.0), 10.0, 0.03
TURN_S, TRAINING_S, SYNC_S = 0.065, 2.17, 0.1
BATCHES, GROUP, FASTER, REPEATS = 16, 8, 10.0, 3


class SleepingRollout:
    """It takes as long as its slowest row: three turns with a search after each of the first two."""

    protocol, engine = SimpleNamespace(stop_strings=()), None

    def __init__(self, stragglers: bool, seed: int) -> None:
        self._random, self._share = random.Random(seed), STRAGGLERS if stragglers else 0.0

    def _search(self) -> float:
        return STRAGGLER_S if self._random.random() < self._share else self._random.uniform(*SEARCH_S)

    def setup(self, trainer: Any) -> RolloutSetup:
        return RolloutSetup(None, None, {}, [1], RolloutLimits())

    def fork(self) -> SleepingRollout:
        return self

    def collect(self, setup: Any, prompts: Sequence[int], *_: Any) -> tuple[dict[str, Any], dict[str, float]]:
        time.sleep(max(3 * TURN_S + self._search() + self._search() for _ in prompts) / FASTER)
        trajectory = SimpleNamespace(turns=[SimpleNamespace(versions=None)])
        return {"completion_ids": list(prompts), "trajectory": [trajectory] * len(prompts)}, {}


def run(rows: int, ranks: int, staleness: int, stragglers: bool, order: str, seed: int) -> float:
    """The seconds that a run would take."""
    barrier, said, own, prompts = threading.Barrier(ranks), [None] * ranks, threading.local(), rows * ranks // GROUP

    def gather(mine: list[Any]) -> list[Any]:
        said[own.rank] = mine[0]
        barrier.wait()
        found = list(said)
        barrier.wait()
        return found

    def train(rank: int) -> None:
        own.rank = rank
        args = {"generation_batch_size": rows * ranks, "cycle_steps": 1, "gradient_accumulation_steps": 1}
        trainer = SimpleNamespace(
            **{"args": SimpleNamespace(**args), "num_generations": GROUP, "use_vllm": False, "_step": 0},
            **{"model": SimpleNamespace(training=True), "_log_metric": lambda *_: None},
            train_dataset=[{"prompt": number} for number in range(prompts)],
            state=SimpleNamespace(global_step=0, max_steps=BATCHES),
            accelerator=SimpleNamespace(num_processes=ranks, process_index=rank),
            _get_train_sampler=lambda: RepeatSampler(list(range(prompts)), GROUP, prompts, shuffle=True, seed=0),
        )
        rollout = SleepingRollout(stragglers, seed + rank)
        ahead = late_rollouts.RolloutsAhead(trainer, rollout, staleness, order == "completed")
        with ahead.running():
            ahead.begin_at(0)
            for batch in islice(upcoming_batches(trainer, 0), BATCHES):
                ahead([row["prompt"] for row in batch], trainer)
                time.sleep((TRAINING_S + SYNC_S) / FASTER)
                trainer.state.global_step += 1

    policy = SimpleNamespace(renew=lambda *_: None, close=list, engine=lambda *_: SimpleNamespace(wake=list))
    late_rollouts.PolicyCopies = lambda _: policy
    late_rollouts.gather_object = vllm_policy.gather_object = gather
    began = time.perf_counter()
    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(train, range(ranks)))
    return (time.perf_counter() - began) * FASTER


def table(found: Sequence[dict[str, Any]]) -> str:
    lines = [
        f"The same pacing with sleeps for models (`benchmarks.async_scale`): seconds of {BATCHES} rollouts, medians.",
        "",
        f"| rows × ranks | searches | order | {' | '.join(f'{each} ahead' for each in STALENESS)} |",
        f"|---|---|---|{'---|' * len(STALENESS)}",
    ]
    for (rows, ranks), (stragglers, order) in product(SIZES, KINDS):
        wanted = {"rows": rows, "ranks": ranks, "stragglers": stragglers, "order": order}
        of = {each["staleness"]: each["wall_seconds"] for each in found if wanted.items() <= each.items()}
        cells = " | ".join(f"{of[each]:.0f}" if each in of else "–" for each in STALENESS)
        lines.append(f"| {rows} × {ranks} | {'3 % of ten seconds' if stragglers else 'even'} | {order} | {cells} |")
    return "\n".join(lines) + "\n"


def main(words: Sequence[str]) -> None:
    from benchmarks.async_speed import write

    Parser(description=(__doc__ or "").split("\n")[0]).parse_args(words)
    found = []
    for (rows, ranks), (stragglers, order), staleness in product(SIZES, KINDS, STALENESS):
        walls = [run(rows, ranks, staleness, stragglers, order, 100 * repeat) for repeat in range(REPEATS)]
        case = {"rows": rows, "ranks": ranks, "staleness": staleness, "stragglers": stragglers, "order": order}
        found.append({"mode": "simulated", **case, "wall_seconds": statistics.median(walls), "walls": walls})
        print(found[-1], flush=True)
    write(found)


if __name__ == "__main__":
    sys.exit(run_command(main))
