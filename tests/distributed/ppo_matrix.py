"""Runs of SO-PPO in one process and in two, and how far their weights end from each other."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sorl_trl.trainers.critic import is_critic_name
from tests.distributed.launch import launch
from tests.distributed.ppo_cases import KINDS, PPOCase, PPOLaunch, build_trainer, write_policy

PARTS = ("policy", "critic")


@dataclass(frozen=True)
class Run:
    """Logs, and the weights of policy and critic at both ends."""

    logs: list[dict[str, Any]]
    start: dict[str, dict[str, Tensor]]
    end: dict[str, dict[str, Tensor]]


class SingleProcess:
    """Runs in this process, in float32, one micro-batch and without gradient checkpointing: all others must agree.

    Args:
        folder: takes `policy/` and, of each kind of critic, a trained one below `start/`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs: dict[str, Run] = {}
        write_policy(folder / "policy")
        for case in KINDS:
            self._train(replace(case, name=f"start/{case.kind}", options={"save_strategy": "steps"}))

    def run(self, case: PPOCase) -> Run:
        """The run that `case` has to agree with."""
        case = replace(case, name="alone", checkpointing="off", dtype="float32", micro_batches=1, is_resumed=False)
        key = str(asdict(case))
        if key not in self._runs:
            self._runs[key] = self._train(case)
        return self._runs[key]

    def _train(self, case: PPOCase) -> Run:
        trainer, _ = build_trainer(case, self.folder)
        start = parts(trainer.model)
        trainer.train()
        return Run(trainer.state.log_history, start, parts(trainer.model))


def parts(model: Any) -> dict[str, dict[str, Tensor]]:
    """Copies of the weights of policy and critic."""
    weights: dict[str, dict[str, Tensor]] = {part: {} for part in PARTS}
    for name, weight in model.state_dict().items():
        weights["critic" if is_critic_name(name) else "policy"][name] = weight.clone()
    return weights


class Launch:
    """Cases under an engine, trained in one launch in a folder of their own.

    Args:
        config: one of `ENGINES`.
        cases: of different names.
        alone: what they start from.
        name: of the folder; by default, the engine's.
    """

    def __init__(self, config: str, cases: list[PPOCase], alone: SingleProcess, name: str | None = None) -> None:
        self.folder = alone.folder / (name or config)
        self.folder.mkdir()
        for shared in ("policy", "start"):
            (self.folder / shared).symlink_to(alone.folder / shared)
        timeout_s = 60.0 + 20.0 * len(cases)
        self.results = launch(config, PPOLaunch(str(self.folder), cases), timeout_s, "tests.distributed.ppo_worker")

    def weights(self, name: str) -> dict[str, dict[str, Tensor]]:
        """What the run `name` ended with, or "{name}/resumed"."""
        return {part: torch.load(self.folder / name / f"{part}.pt") for part in PARTS}


def distance(weights: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """The largest difference of two weights of one name."""
    _check_names(weights, others)
    return max(float((weight - others[name]).abs().max()) for name, weight in weights.items())


def relative_distance(weights: dict[str, Tensor], end: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    """‖weights - end‖₂ / ‖end - start‖₂: the error as a share of what was learned."""
    _check_names(weights, end)
    error, learned = (
        sum(float((a[name] - b[name]).square().sum()) for name in end) for a, b in ((weights, end), (end, start))
    )
    return (error / learned) ** 0.5


def _check_names(weights: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    assert weights.keys() == others.keys(), sorted(weights.keys() ^ others.keys())
