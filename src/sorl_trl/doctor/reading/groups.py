"""Whether batches hold whole groups."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import Any

from sorl_trl.doctor.findings import Finding
from sorl_trl.doctor.reading.recipe_file import RecipeFile


def mend_groups(recipe: RecipeFile, raw: Any, num_processes: int) -> Iterator[tuple[Finding, dict[str, int]]]:
    """What does not divide, each with values that do: with those the other arguments can still be checked.

    All counts are at least 1 (`COUNTS` of trainers/config_rules.py).
    """
    size, rows = raw.num_generations or 1, _rollout_rows(raw, num_processes)
    if raw.trainer != "so_ppo" and size < 2:
        what = f"`num_generations` is {size}: a group of one is its own baseline; 'so_ppo' can do with 1"
        mended = _mended(raw, rows, 8)
        size = mended.get("num_generations", 8)
        yield Finding("error", what, recipe.line("num_generations", size)), {"num_generations": size, **mended}
    elif rows % size:
        what = f"a rollout of {rows} trajectories{_product(raw, num_processes)} does not hold whole groups of {size}"
        mended = _mended(raw, rows, size)
        size = mended.get("num_generations", size)
        yield Finding("error", what, recipe.line(*next(iter(mended.items())))), mended
    evaluated = raw.num_generations_eval or size
    step = raw.per_device_eval_batch_size * num_processes
    if raw.eval_strategy != "no" and step % evaluated:
        what = f"an evaluation step of {step} trajectories does not hold whole groups of {evaluated}"
        rows = evaluated * -(-raw.per_device_eval_batch_size // evaluated)
        line = recipe.line("per_device_eval_batch_size", rows)
        yield Finding("error", what, line), {"per_device_eval_batch_size": rows}


def _mended(raw: Any, rows: int, size: int) -> dict[str, int]:
    """Another group size that divides `rows`, the largest below `size`; where there is none, longer rollouts."""
    if smaller := next((d for d in range(min(size, rows), 1, -1) if rows % d == 0), 0):
        return {"num_generations": smaller}
    if raw.generation_batch_size:
        return {"generation_batch_size": rows * size}
    return {"steps_per_generation": _steps(raw) * (size // gcd(rows, size))}


def _steps(raw: Any) -> int:
    """Micro-batches of one rollout."""
    return int(raw.steps_per_generation or raw.gradient_accumulation_steps)


def _rollout_rows(raw: Any, num_processes: int) -> int:
    """Trajectories of one rollout, over all processes."""
    return int(raw.generation_batch_size or raw.per_device_train_batch_size * num_processes * _steps(raw))


def _product(raw: Any, num_processes: int) -> str:
    if raw.generation_batch_size:
        return ""
    steps = "steps_per_generation" if raw.steps_per_generation else "gradient_accumulation_steps"
    return (
        f" (per_device_train_batch_size {raw.per_device_train_batch_size} x {steps} {getattr(raw, steps)} "
        f"x processes {num_processes})"
    )
