"""Which methods hold when rollouts are sampled ahead: questions of one hop or two, a tiny policy, real threads.

    python -m benchmarks.async_worlds

The regime is "stale" of `benchmarks.stability` (8 updates on each of 32 rollouts, at a learning rate of 1e-3), but
copies of the policy sample the next batches while one is trained on, as with `async_staleness`. Rows are added to
`results/async_worlds.json`, and runs that it has are not repeated; `async_worlds.md` is their table. Several of these
commands may run side by side.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, Row, claim, locked, read_rows, table, write_rows
from benchmarks.stability_plan import COLUMNS, BenchmarkMethod
from benchmarks.stability_report import Run
from benchmarks.stability_run import evaluations_of, prepare, trainer_of
from sorl_trl.command_line import Parser, run_command
from sorl_trl.methods import METHODS as PUBLISHED
from sorl_trl.methods import SETTINGS, Method

FILE = RESULTS / "async_worlds.json"
FOLDER = Path("runs/async_worlds")
SEEDS = (201, 202, 203, 204, 205)
STALENESS = (0, 1, 2, 4, 8)
METHODS = {name: (PUBLISHED[name], SETTINGS[name]) for name in ("grpo", "gspo", "so_grpo", "so_ppo")}
"""Pieces, and fields of the config."""
PARTS = {
    "grpo_target_kl": (PUBLISHED["grpo"], SETTINGS["grpo"] | {"target_kl": 0.01}),
    "turns": (Method(), {"target_kl": 0.0}),
    "turns_penalty": (PUBLISHED["so_grpo"], {"target_kl": 0.0}),
}
"""What makes the difference between GRPO and SO-GRPO, which is the last of these with a target KL."""
STALENESS_OF_PARTS = (0, 4, 8)
REGIME = replace(COLUMNS["stale"], staleness=0)
Key = tuple[str, int, str, int]
"""Method, staleness, old policy, seed."""


def jobs() -> Iterator[Key]:
    """A seed after the other, so that a part of them is a table too."""
    for seed in SEEDS:
        for method in METHODS:
            for staleness in STALENESS:
                for old_policy in ("behaviour", "proximal") if staleness else ("behaviour",):
                    yield method, staleness, old_policy, seed
        for method in PARTS:
            for staleness in STALENESS_OF_PARTS:
                yield method, staleness, "behaviour", seed


def build_trainer(key: Key, folder: Path, output: str) -> Any:
    """Ready to train in the world that `prepare` made in `folder`."""
    name, staleness, old_policy, seed = key
    trainer = "so_ppo" if name == "so_ppo" else "so_grpo"
    pieces, settings = {**METHODS, **PARTS}[name]
    method = BenchmarkMethod(name, trainer, settings, pieces)
    own = {"output_dir": output, "seed": seed, "learning_rate": REGIME.learning_rate}
    own |= {"async_staleness": staleness, "async_old_policy": old_policy, "log_turn_details": True}
    return trainer_of(REGIME, method, folder, own)


def run(key: Key) -> dict[str, Any]:
    method, staleness, old_policy, seed = key
    with locked(FOLDER / "world.lock"):  # the others wait for the warm start
        world = prepare(REGIME.world, seed, FOLDER)
    with tempfile.TemporaryDirectory() as output:
        trainer = build_trainer(key, world, output)
        trainer.train()
    log, curve = trainer.state.log_history, evaluations_of(trainer)
    found = Run({"evaluations": curve, "error": None})

    def logged(name: str) -> list[float]:
        return [entry[name] for entry in log if entry.get(name) is not None]

    return {
        **{"method": method, "staleness": staleness, "old_policy": old_policy, "seed": seed},
        **{"start_em": found.start, "final_em": found.final("sampled_em"), "best_em": found.best},
        "curve": [(each["rollout"], each["sampled_em"]) for each in curve],
        "collapsed": found.collapsed,
        "age_mean": statistics.fmean(logged("async/age_mean") or [0.0]),
        "age_max": max(logged("async/age_max"), default=0.0),
        "clip_fraction": statistics.fmean(logged("clip_ratio/region_mean")),
        "effective_sample_size": statistics.fmean(logged("effective_sample_size")),
        "kl_max": max(logged("kl_to_old")),
        "policy_parameters": trainer.model.num_parameters(),
    }


HEADER = """# Rollouts ahead of training, on questions of one hop or two

Final sampled exact match, mean over seeds, and how many runs ended below their start or half of their best.
The runs of `so_ppo` are older than the scaling of its critic's head."""


def report(rows: Sequence[Row]) -> str:
    lines = []
    for method in (*METHODS, *PARTS):
        for old_policy in ("behaviour", "proximal") if method in METHODS else ("behaviour",):
            cells, seeds = [], set()
            for staleness in STALENESS:
                wanted = (method, staleness, old_policy if staleness else "behaviour")
                of = [row for row in rows if (row["method"], row["staleness"], row["old_policy"]) == wanted]
                if staleness in STALENESS_OF_PARTS or method in METHODS:
                    seeds.add(len(of))
                fallen = sum(row["collapsed"] for row in of)
                mean = f"{statistics.fmean(row['final_em'] for row in of):.2f}" if of else "–"
                cells.append(f"{mean}, {fallen} of {len(of)}" if fallen else mean)
            several = "–".join(map(str, sorted({min(seeds), max(seeds)})))
            lines.append([f"`{method}`", old_policy, several, *cells])
    columns = ["method", "old policy", "seeds", *(f"{each} ahead" for each in STALENESS)]
    return f"{HEADER}\n\n{table(columns, lines)}"


def main(words: Sequence[str]) -> None:
    parser = Parser(description=(__doc__ or "").split("\n")[0])
    parser.parse_args(words)
    FOLDER.mkdir(parents=True, exist_ok=True)
    lock = FOLDER / "lock"
    for key in jobs():
        if not claim(FOLDER / "-".join(map(str, key)), lock):
            continue
        if any((row["method"], row["staleness"], row["old_policy"], row["seed"]) == key for row in read_rows(FILE)):
            continue
        row = run(key)
        with locked(lock):
            rows = [*read_rows(FILE), row]
            rows.sort(key=lambda row: [str(row[name]) for name in ("method", "staleness")])
            write_rows(rows, FILE)
            FILE.with_suffix(".md").write_text(report(rows))
        print(*key, f"{row['final_em']:.3f}", flush=True)


if __name__ == "__main__":
    sys.exit(run_command(main))
