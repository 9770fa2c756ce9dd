"""A healthy recipe that is changed in one way, and the one finding that it must give."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.unit.doctor.recipes import line_of, the_complaint, write_recipe

PPO = {"trainer": "so_ppo", "num_generations": 1, "steps_per_generation": 1, "num_iterations": 2}
SEEUPO = {"trainer": "seeupo", "num_iterations": 3}
VLLM = {"use_vllm": True, "vllm_max_model_length": 64}


@dataclass(frozen=True)
class Case:
    """A change, and the one finding that it must give."""

    changed: dict[str, Any]
    check: str
    what: str
    change: str
    """The argument to change, with its new value where there is one."""
    level: str = "error"
    num_processes: int = 1


def assert_found(tmp_path: Path, case: Case) -> None:
    """The finding of the case, and nothing else."""
    recipe = write_recipe(tmp_path, **case.changed)
    recipe.write_text(recipe.read_text().replace('"null"', "null"))
    found = the_complaint(recipe, num_processes=case.num_processes)
    assert (found.check, found.level) == (case.check, case.level)
    assert case.what in found.what
    argument = case.change.partition(":")[0]
    place = line_of(recipe, argument) if f"\n{argument}:" in recipe.read_text() else f"(not in {recipe} yet)"
    assert found.change == f"{case.change}  {place}"
